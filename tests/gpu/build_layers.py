"""Compile every layer that the GPU tests use into the cache, on a machine with the compiler and without a GPU.

    MOKGEN_CACHE_DIR=DIR python tests/gpu/build_layers.py [NAME...]

NAME is a variant of tests/layers.py or the stem of a spec; default: all of both. Carry DIR to the GPU machine and set
MOKGEN_CACHE_DIR there: the tests find each artifact by its layer key.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from layers import VARIANTS, resolved  # noqa: E402

from mokgen.driver import build  # noqa: E402
from mokgen.settings import shipped  # noqa: E402

ARCH = "sm_90a"


def main(names: list[str]) -> int:
    specs = {path.stem: path for path in sorted(shipped("specs").glob("*.yaml"))}
    unknown = sorted(set(names) - set(VARIANTS) - set(specs))
    if unknown:
        print(f"unknown: {', '.join(unknown)}; known: {', '.join([*VARIANTS, *specs])}", file=sys.stderr)
        return 2
    for name in names or [*VARIANTS, *specs]:
        start = time.perf_counter()
        source = specs[name] if name in specs else resolved(**VARIANTS[name])
        result = build(source, arch=ARCH)
        found = "hit" if result.cache_hit else "built"
        print(f"{name}: {found} in {time.perf_counter() - start:.1f} s, {result.artifact_dir}", flush=True)
        for finding in result.findings:
            print(f"  finding: {finding}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
