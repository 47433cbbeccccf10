"""One measurement of one contender, in a process that does nothing else. Prints one line of JSON.

    python contender.py NAME ACTION TASK

NAME is a module ``of_NAME`` beside this file, TASK a JSON object. Each module offers what it can of:

    getter(task)    a function from a key to the object's size, having read all of it; called by several threads
    pages(task)     batches of ids, (batch, width), of some pages
"""

from __future__ import annotations

import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path
from typing import Any


def reads(module: Any, task: dict[str, Any]) -> dict[str, Any]:
    """MB a second of whole objects, by so many threads; connections are there before."""
    get = module.getter(task)
    with ThreadPoolExecutor(task["threads"]) as pool:
        list(pool.map(get, task["keys"][: task["threads"]]))
        began, used = time.perf_counter(), time.process_time()
        size = sum(pool.map(get, task["keys"]))
        elapsed, used = time.perf_counter() - began, time.process_time() - used
    return {"mb_per_s": size / elapsed / 1e6, "cpu_s_per_gb": used / size * 1e9}


def pages(module: Any, task: dict[str, Any]) -> dict[str, Any]:
    """Tokens a second from naming the pages to their last batch; the tokenizer is there before."""
    tokenizer = module.tokenizer(task)
    tokens = batches = 0
    began = time.perf_counter()
    first_s = 0.0
    for batch in module.pages(task, tokenizer):
        first_s = first_s or time.perf_counter() - began
        tokens += batch.size
        batches += 1
    elapsed = time.perf_counter() - began
    return {
        "tokens_per_s": tokens / elapsed,
        "tokens": tokens,
        "batches": batches,
        "seconds": elapsed,
        "page_s": elapsed / task["n_pages"],
        "first_batch_s": first_s,
        "rss_mb": _peak_mb(),
    }


def _peak_mb() -> float:
    """Of this process alone: what getrusage tells begins with the parent's."""
    with Path("/proc/self/status").open() as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) / 1024


def main() -> None:
    name, action, task = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
    told = {"reads": reads, "pages": pages}[action](import_module(f"of_{name}"), task)
    print("\n" + json.dumps(told), flush=True)


if __name__ == "__main__":
    main()
