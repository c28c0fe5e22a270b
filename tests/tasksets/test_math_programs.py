"""Programs made of the computations that GSM8K's solutions mark."""

from __future__ import annotations

import subprocess
import sys

import pytest
from benchmark_files import SHARED, real_data

from agent_r1.core.taskset import ReferenceSolution
from agent_r1.tasksets.math import worked_solution
from agent_r1.tasksets.math.problems import read_problems
from agent_r1.tasksets.math.programs import program_of, without_marks


@pytest.mark.parametrize(
    ("worked", "answer"),
    [
        ("It is 18.\n#### 18", "18"),
        ("It is <<18=18>>18.\n#### 18", "18"),
        ("6*3 = <<6*3=18>>18\n#### 19", "19"),
        ("It is <<__import__('os').getpid()=18>>18\n#### 18", "18"),
        ("It is <<50%*36=18>>18\n#### 18", "18"),
        ("It is <<1/0=18>>18\n#### 18", "18"),
        ("It is <<6*3=18>>18\n#### 18 eggs", "18 eggs"),
    ],
    ids=["no mark", "nothing computed", "another result", "a call", "not Python", "no value", "no number"],
)
def test_what_cannot_be_computed_has_no_program(worked: str, answer: str) -> None:
    assert program_of("How many?", worked, answer) is None


@real_data
def test_programs_of_the_benchmark_print_its_answers() -> None:
    problems = read_problems(SHARED / "gsm8k_test_300.jsonl")
    programs = [(each.answer, program_of(each.text, each.worked, each.answer)) for each in problems]
    programs = [(answer, code) for answer, code in programs if code is not None]
    assert len(programs) > 250
    script = "\n".join(code for _, code in programs if code is not None)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, encoding="utf-8", check=True, timeout=60)
    printed = [float(line) for line in done.stdout.split()]
    assert printed == pytest.approx([float(answer.replace(",", "")) for answer, _ in programs])


@pytest.mark.parametrize(
    ("question", "worked", "answer", "code"),
    [
        # a number of the question stays, although a line computed the same
        ("3 red and 3 blue?", "6/2 = <<6/2=3>>3. So 3+4 = <<3+4=7>>7.", "7", "a = 6/2\n# So\nb = 3+4\nprint(b)"),
        ("How many?", "6/3 = <<6/3=2>>2. So 2+4 = <<2+4=6>>6.", "6", "a = 6/3\n# So\nb = a+4\nprint(b)"),
        (
            "How many?",
            "9+91 = <<9+91=100>>100. 20% is <<100*20/100=20>>20.",
            "20",
            "a = 9+91\nb = 100*20",
        ),
        # no comment says what its line computes
        ("How many?", "There are 7 because 3+4 = <<3+4=7>>7.", "7", "a = 3+4\nprint(a)"),
        ("How many?", "20% of 50 is .2*50 = <<.2*50=10>>10 eggs.", "10", "# 20% of 50 is .. eggs\na = .2*50\nprint(a)"),
    ],
)
def test_programs_say_what_they_compute(question: str, worked: str, answer: str, code: str) -> None:
    program = program_of(question, worked, answer)
    assert program is not None and program.startswith(code)


def test_the_solution_to_imitate_is_a_program_or_the_worked_text() -> None:
    def text_of(solutions: tuple[ReferenceSolution, ...]) -> list[str]:
        return [each.respond((), 0).text for each in solutions]

    (program,) = worked_solution("", "He has 6*3 = <<6*3=18>>18.\n#### 18", "18")
    assert program.respond((), 0).calls[0].arguments == {"code": "# He has\na = 6*3\nprint(a)"}
    assert text_of(worked_solution("", "Six times three.\n#### 18", "18")) == [
        r"Six times three. The answer is \boxed{18}."
    ]
    assert text_of(worked_solution("", r"So it is $\boxed{\pi}$.", r"\pi")) == [r"So it is $\boxed{\pi}$."]
    assert worked_solution("", "18", "18") == worked_solution("", "", "18") == ()
    assert without_marks("It is 2*3 = <<2*3=6>>6.\n#### 6") == "It is 2*3 = 6."
    assert without_marks("A.\n#### Step 1\nSo $\\boxed{6}$.") == "A.\n#### Step 1\nSo $\\boxed{6}$."
