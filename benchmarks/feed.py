"""DistributedLoader beside its peers and beside the least that is possible, on the same real text in one run.

    python benchmarks/feed.py --setup-peers FOLDER      once: an environment with the peers, apart from this one
    python benchmarks/feed.py --peers FOLDER [--work FOLDER] [--only SECTION ...] [--rounds 5] [--quick] [--json]

Sections, and what is asked of them:

    raw       raw text to packed batches, nothing cached: 20 times HF streaming with `tokenizers`, half of gigatoken
    rows      shuffled rows of 2 048 tokens from the token cache: 5 times the fastest peer, 0.8 of a bare memory map
    first     from the start of a process to its first batch: twice `import numpy` and opening the files; resumed at
              90 % of the epoch, 1.2 times that; both below every peer's
    memory    peak memory at four times the data: at most a tenth more
    once      10 007 samples on 4 ranks, killed at step 151, resumed on 4 and on 3: none repeated, none lost, all ranks
              with the same steps
    huge      a store of 10**9 samples: opened, at 99 %, first batch in a second and in 200 MB
    order     indices of the permutations, on one core: 5 million a second

Every measurement is a process of its own. Contenders take turns, and figures are medians of the rounds: a noisy machine
is noisy for all. Peers load rows that were tokenised and packed before, in their own format and in the fastest of some
configurations; whoever hands out a batch, its bytes are copied once into a buffer that stays. Without --peers only
Penstock and the limits are measured. A peer that fails is told of and left out.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from feed_peers import sections
from feed_peers.children import CONTENDER, PEERS, set_up_peers
from feed_peers.crash import exactly_once
from feed_peers.material import Material
from measuring import Children, log, peer_python, show

SECTIONS: dict[str, Callable[[sections.Bench], dict[str, Any]]] = {
    "raw": sections.raw_text,
    "rows": sections.rows,
    "first": sections.first_batch,
    "memory": sections.memory,
    "once": lambda bench: exactly_once(bench.children, bench.material),
    "huge": sections.huge,
    "order": sections.order,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--setup-peers", type=Path, metavar="FOLDER", help="install the peers there, and end")
    parser.add_argument("--peers", type=Path, metavar="FOLDER", help="the peers' environment")
    parser.add_argument(
        "--work", type=Path, metavar="FOLDER", help="where the data goes and stays; else a temporary one"
    )
    parser.add_argument("--only", choices=list(SECTIONS), action="append", help="this section; may be repeated")
    parser.add_argument("--text-mb", type=int, default=50, help="how much text there is")
    parser.add_argument("--rounds", type=int, help="5, or 1 with --quick")
    parser.add_argument("--quick", action="store_true", help="little data, short runs: to see that it works")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.setup_peers:
        set_up_peers(options.setup_peers)
        return
    with ExitStack() as stack:
        work = options.work or Path(stack.enter_context(TemporaryDirectory(ignore_cleanup_errors=True)))
        work = work.absolute()
        work.mkdir(parents=True, exist_ok=True)
        home = work / "home"
        home.mkdir(exist_ok=True)
        python = peer_python(options.peers)
        text_mb, copies, memory_copies = (8, 2, 4) if options.quick else (options.text_mb, 8, 4)
        bench = sections.Bench(
            children=Children(CONTENDER, PEERS if python else (), python, home),
            material=Material(work, text_mb, copies, memory_copies),
            rounds=options.rounds or (1 if options.quick else 5),
            seconds=0.5 if options.quick else 2.0,
        )
        found: dict[str, Any] = {}
        for name in options.only or SECTIONS:
            log(f"== {name}")
            found[name] = SECTIONS[name](bench)
        found["vocabulary"] = bench.material.vocabulary if (work / "vocabulary.txt").exists() else None
    if options.json:
        print(json.dumps(found, indent=2))
        return
    for name, value in found.items():
        show(name, value)


if __name__ == "__main__":
    main()
