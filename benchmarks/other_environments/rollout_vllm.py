"""Sample with vLLM for the prompts of benchmarks/rollout.py, and print the median of tokens per CPU second.

    .venv/vllm/bin/python benchmarks/other_environments/rollout_vllm.py FOLDER

Only rollout.py runs this script. It runs in an environment of its own, without Agent-R1. FOLDER has the model, and
``work.json``. vLLM runs in this process, so that the CPU seconds of the process are those of vLLM.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from pathlib import Path

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "OMP_NUM_THREADS": "1",
}
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", str(min(os.sched_getaffinity(0))))

from vllm import LLM, SamplingParams


def main() -> None:
    folder = Path(sys.argv[1])
    work = json.loads((folder / "work.json").read_text())
    length = len(work["batches"][0][0]) + work["action"]
    engine = LLM(str(folder), dtype="float32", enforce_eager=True, block_size=32, max_model_len=length)
    params = SamplingParams(temperature=1.0, max_tokens=work["action"], ignore_eos=True, logprobs=0, detokenize=False)
    rates = []
    for batch in work["batches"]:
        start = time.process_time()
        found = engine.generate([{"prompt_token_ids": prompt} for prompt in batch], params, use_tqdm=False)
        tokens = sum(len(one.outputs[0].token_ids) for one in found)
        rates.append(tokens / (time.process_time() - start))
    print(statistics.median(rates[1:]))


if __name__ == "__main__":
    main()
