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
        ("6*3 = <<6*3=18>>18\n#### 19", "19"),
        ("It is <<__import__('os').getpid()=18>>18\n#### 18", "18"),
        ("It is <<50%*36=18>>18\n#### 18", "18"),
        ("It is <<1/0=18>>18\n#### 18", "18"),
        ("It is <<6*3=18>>18\n#### 18 eggs", "18 eggs"),
    ],
    ids=["no mark", "another result", "a call", "not Python", "no value", "no number"],
)
def test_what_cannot_be_computed_has_no_program(worked: str, answer: str) -> None:
    assert program_of(worked, answer) is None


@real_data
def test_programs_of_the_benchmark_print_its_answers() -> None:
    problems = read_problems(SHARED / "gsm8k_test_300.jsonl")
    programs = {each.answer: code for each in problems if (code := program_of(each.worked, each.answer)) is not None}
    assert len(programs) > 100
    script = "\n".join(programs.values())
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    printed = [float(line) for line in done.stdout.split()]
    assert printed == pytest.approx([float(each.replace(",", "")) for each in programs])


def test_the_solution_to_imitate_is_a_program_or_the_worked_text() -> None:
    def text_of(solutions: tuple[ReferenceSolution, ...]) -> list[str]:
        return [each.respond((), 0).text for each in solutions]

    (program,) = worked_solution("He has 6*3 = <<6*3=18>>18.\n#### 18", "18")
    assert program.respond((), 0).calls[0].arguments == {"code": "# He has\na = 6*3\nprint(a)"}
    assert text_of(worked_solution("Six times three.\n#### 18", "18")) == [
        r"Six times three. The answer is \boxed{18}."
    ]
    assert text_of(worked_solution(r"So it is $\boxed{\pi}$.", r"\pi")) == [r"So it is $\boxed{\pi}$."]
    assert worked_solution("18", "18") == worked_solution("", "18") == ()
    assert without_marks("It is 2*3 = <<2*3=6>>6.\n#### 6") == "It is 2*3 = 6."
