"""Object stores beside a bare loop and beside s3fs, on a real S3 server of this machine, in one run.

    python benchmarks/storage.py --setup-peers FOLDER      once: an environment with s3fs, apart from this one
    python benchmarks/storage.py [--peers FOLDER] [--work FOLDER] [--only SECTION ...] [--rounds 5] [--quick] [--json]

Sections, and what is asked of them:

    reads     whole objects: 0.85 of a bare `http.client` loop with as many threads, 1.5 times s3fs
    pages     pages of a Parquet data set to batches of ids: 10 times a page loader as it is usually written over s3fs
    growth    the time of a page among 96 pages: at most 1.2 times that among 6
    memory    of 96 pages: what they take beyond 6 pages is within the loader's budget
    trouble   all pages again and again through three endpoints of which one is dead, with a fifth of the requests
              refused, bodies cut and one request in a hundred stalled for 2 s: at most twice the time without

Every measurement is a process of its own; contenders take turns, figures are medians of the rounds. The server runs on
the same cores.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from equipment.proxy import faulty_proxy
from equipment.servers import S3Server, s3_server
from feed_peers.material import Material
from measuring import Children, Result, interleaved, log, peer_python, ratio, set_up, show
from penstock.storage import open_storage

BUCKET = "bench"
DATASET = "pages"
WIDTH, BATCH, REQUESTS, SEED = 2_048, 8, 8, 7
ROWS_PER_PAGE, ROW_GROUP = 100, 1_000
_ROW_CHARS = 3_000


@dataclass(frozen=True)
class Bench:
    """What the sections share."""

    server: S3Server
    children: Children
    material: Material
    rounds: int
    quick: bool

    @property
    def task(self) -> Result:
        return {
            "bucket": BUCKET,
            "endpoint": self.server.url,
            "key": self.server.access_key,
            "secret": self.server.secret_key,
        }

    @cached_property
    def shards(self) -> dict[str, int]:
        """The Parquet files of the data set, with their rows; written to the bucket."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        texts = (json.loads(line)["text"] for line in self.material.texts.open("rb"))
        rows = [text[at : at + _ROW_CHARS] for text in texts for at in range(0, len(text), _ROW_CHARS)]
        count = 2 if self.quick else 8
        store = open_storage(f"s3://{BUCKET}")
        sizes = {}
        for number in range(count):
            mine = rows[number * len(rows) // count : (number + 1) * len(rows) // count]
            path = self.material.work / "shard.parquet"
            table = pa.table({"id": list(range(len(mine))), "text": mine})
            pq.write_table(table, path, row_group_size=ROW_GROUP, compression="snappy")
            store.put(f"{DATASET}/default/{number:05d}.parquet", path.read_bytes())
            sizes[f"{DATASET}/default/{number:05d}.parquet"] = len(mine)
        subprocess.run([sys.executable, "-m", "penstock", "pages", "index", f"s3://{BUCKET}/{DATASET}"], check=True)
        return sizes

    def pages_task(self, n_pages: int, **more: Any) -> Result:
        """So many pages; for the peer, at places drawn by the same rule in its own way."""
        drawn = random.Random(SEED)
        places = []
        for _ in range(n_pages):
            shard = drawn.choice(list(self.shards))
            row_group = drawn.randrange(max(1, self.shards[shard] // ROW_GROUP))
            places.append([shard, row_group, drawn.randrange(0, ROW_GROUP, ROWS_PER_PAGE), ROWS_PER_PAGE])
        return self.task | {
            "n_pages": n_pages,
            "pages": places,
            "rows": ROWS_PER_PAGE,
            "seed": SEED,
            "batch": BATCH,
            "width": WIDTH,
            "requests": REQUESTS,
            "tokenizer": str(self.material.tokenizer),
            "dataset": f"s3://{BUCKET}/{DATASET}",
            **more,
        }

    def measured(self, name: str, action: str, task: Result) -> Callable[[], Result]:
        return lambda: self.children.run(name, action, task)


def signed(server: S3Server, method: Any, paths: list[str]) -> list[str]:
    """Addresses that need no key for some hours."""
    import obstore
    from obstore.store import S3Store

    signer = S3Store(
        BUCKET,
        endpoint=server.url,
        access_key_id=server.access_key,
        secret_access_key=server.secret_key,
        region="us-east-1",
        client_options={"allow_http": True},
    )
    return list(obstore.sign(signer, method, paths, timedelta(hours=6)))


def reads(bench: Bench) -> dict[str, Any]:
    """Whole objects, MB a second."""
    store = open_storage(f"s3://{BUCKET}")
    found: dict[str, Any] = {}
    for size_mb, count in ((16, 24), (4, 64), (1, 128)) if not bench.quick else ((4, 16),):
        keys = [f"objects/{size_mb}/{number:03d}" for number in range(count)]
        data = os.urandom(size_mb << 20)
        for key in keys:
            store.put(key, data)
        addresses = dict(zip(keys, signed(bench.server, "GET", keys), strict=True))
        for threads in (8,) if bench.quick else (1, 8):
            task = bench.task | {"keys": keys, "threads": threads}
            contenders = {
                "bare http.client": bench.measured("bare", "reads", task | {"signed": addresses}),
                "penstock, where it arrived": bench.measured("penstock", "reads", task | {"view": True}),
                "penstock, as bytes": bench.measured("penstock", "reads", task),
            }
            if bench.children.peers:
                contenders["s3fs"] = bench.measured("s3fs", "reads", task)
            log(f"{count} objects of {size_mb} MB, {threads} threads")
            rates = interleaved(contenders, "mb_per_s", bench.rounds)
            ours, as_bytes = rates["penstock, where it arrived"], rates["penstock, as bytes"]
            found[f"{count} objects of {size_mb} MB, {threads} threads"] = {
                "MB a second": rates,
                "penstock / bare (asked: 0.85)": ratio(ours, rates["bare http.client"]),
                "penstock as bytes / bare": ratio(as_bytes, rates["bare http.client"]),
                "penstock / s3fs (asked: 1.5)": ratio(ours, rates.get("s3fs")),
                "penstock as bytes / s3fs": ratio(as_bytes, rates.get("s3fs")),
            }
    return found


def pages(bench: Bench) -> dict[str, Any]:
    """Pages to batches, tokens a second with loading included."""
    task = bench.pages_task(6 if bench.quick else 48)
    contenders = {"penstock": bench.measured("penstock", "pages", task)}
    if bench.children.peers:
        contenders["page loader over s3fs"] = bench.measured("s3fs", "pages", task)
    rates = interleaved(contenders, "tokens_per_s", bench.rounds)
    return {
        "tokens a second": rates,
        "penstock / page loader over s3fs (asked: 10)": ratio(rates["penstock"], rates.get("page loader over s3fs")),
    }


def growth(bench: Bench) -> dict[str, Any]:
    """The time of a page by their number."""
    counts = (2, 6) if bench.quick else (6, 12, 24, 48, 96)
    contenders = {f"{n} pages": bench.measured("penstock", "pages", bench.pages_task(n)) for n in counts}
    times = interleaved(contenders, "page_s", bench.rounds)
    few, many = times[f"{counts[0]} pages"], times[f"{counts[-1]} pages"]
    return {"seconds a page": times, "many / few (asked: 1.2 at most)": ratio(many, few)}


def memory(bench: Bench) -> dict[str, Any]:
    """Peak resident memory in MB."""
    counts = (2, 6) if bench.quick else (6, 96)
    contenders = {f"{n} pages": bench.measured("penstock", "pages", bench.pages_task(n)) for n in counts}
    peaks = interleaved(contenders, "rss_mb", bench.rounds)
    from penstock import R2DatasetLoader

    few, many = peaks[f"{counts[0]} pages"], peaks[f"{counts[-1]} pages"]
    budget = R2DatasetLoader.PREFETCH_BYTES / 1e6
    return {"peak MB": peaks, "more MB": many - few, "budget MB (asked: more is within it)": budget}


def trouble(bench: Bench) -> dict[str, Any]:
    """A run over many windows, clean and through trouble."""
    n_pages = 6 if bench.quick else 96
    windows = 2 if bench.quick else 12

    def run(urls: list[str]) -> Result:
        buckets = [
            {
                "account_id": "any",
                "name": BUCKET,
                "endpoint_url": url,
                "credentials": {
                    side: {"access_key_id": bench.server.access_key, "secret_access_key": bench.server.secret_key}
                    for side in ("read", "write")
                },
            }
            for url in urls
        ]
        env = {"R2_DATASET_BUCKET_LIST": json.dumps(buckets)}
        total = {"seconds": 0.0, "tokens": 0}
        for window in range(windows):
            task = bench.pages_task(n_pages, offset=window * n_pages, dataset=None, subfolder=DATASET)
            told = bench.children.finish(bench.children.start("penstock", "pages", task, env), 300)
            if "error" in told:
                return told
            total = {name: total[name] + told[name] for name in total}
        return total

    with ExitStack() as stack:
        proxies = [
            stack.enter_context(faulty_proxy(bench.server.url, status=0.2, cut=0.05, stall=0.01, stall_s=2.0))
            for _ in range(2)
        ]
        dead = "http://127.0.0.1:9"
        clean = [stack.enter_context(faulty_proxy(bench.server.url)) for _ in range(3)]
        contenders = {
            "clean": lambda: run([proxy.url for proxy in clean]),
            "through trouble": lambda: run([proxies[0].url, dead, proxies[1].url]),
        }
        found = interleaved(contenders, "seconds", bench.rounds)
        made = {kind: sum(proxy.made[kind] for proxy in proxies) for kind in ("status", "cut", "stall")}
    return {
        "seconds": found,
        "trouble made": made,
        "through trouble / clean (asked: 2 at most)": ratio(found["through trouble"], found["clean"]),
    }


SECTIONS: dict[str, Callable[[Bench], dict[str, Any]]] = {
    "reads": reads,
    "pages": pages,
    "growth": growth,
    "memory": memory,
    "trouble": trouble,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--setup-peers", type=Path, metavar="FOLDER", help="install the peers there, and end")
    parser.add_argument("--peers", type=Path, metavar="FOLDER", help="the peers' environment")
    parser.add_argument("--work", type=Path, metavar="FOLDER", help="where texts go and stay; else a temporary one")
    parser.add_argument("--only", choices=list(SECTIONS), action="append", help="this section; may be repeated")
    parser.add_argument("--rounds", type=int, help="5, or 1 with --quick")
    parser.add_argument("--quick", action="store_true", help="little data, short runs: to see that it works")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.setup_peers:
        set_up(options.setup_peers, ["s3fs", "pyarrow", "tokenizers", "numpy"])
        return
    python = peer_python(options.peers)
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(TemporaryDirectory(ignore_cleanup_errors=True)))
        work = (options.work or scratch).absolute()
        work.mkdir(parents=True, exist_ok=True)
        (scratch / "home").mkdir()
        server = stack.enter_context(s3_server(scratch / "s3"))
        env = {
            "AWS_ACCESS_KEY_ID": server.access_key,
            "AWS_SECRET_ACCESS_KEY": server.secret_key,
            "AWS_ENDPOINT_URL": server.url,
            "AWS_REGION": "us-east-1",
        }
        os.environ.update(env)
        (address,) = signed(server, "PUT", [""])
        urllib.request.urlopen(urllib.request.Request(address, method="PUT")).close()
        bench = Bench(
            server=server,
            children=Children(
                Path(__file__).parent / "storage_peers" / "contender.py",
                ("s3fs",) if python else (),
                python,
                scratch / "home",
                env,
            ),
            material=Material(work, 8 if options.quick else 50, 1, 1),
            rounds=options.rounds or (1 if options.quick else 5),
            quick=options.quick,
        )
        found: dict[str, Any] = {}
        for name in options.only or SECTIONS:
            log(f"== {name}")
            found[name] = SECTIONS[name](bench)
    if options.json:
        print(json.dumps(found, indent=2))
        return
    for name, value in found.items():
        show(name, value)


if __name__ == "__main__":
    main()
