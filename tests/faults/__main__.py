"""``python -m tests.faults``."""

import argparse
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from tests.faults import FAULTS
from tests.faults.judging import ROOT, TIMEOUT_S, judge, run_pytest


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.faults",
        description="Put deliberate faults in and demand that their tests turn red.",
    )
    parser.add_argument("names", nargs="*", help="faults to try (default: all)")
    parser.add_argument("--list", action="store_true", help="list the faults and stop")
    parser.add_argument("--no-green", action="store_true", help="do not check first that the tests are green")
    parser.add_argument("--workers", type=int, default=2, help="faults tried at the same time (default: 2)")
    options = parser.parse_args(arguments)
    unknown = set(options.names) - {fault.name for fault in FAULTS}
    if unknown:
        parser.error(f"no such fault: {', '.join(sorted(unknown))}; see --list")
    chosen = [fault for fault in FAULTS if not options.names or fault.name in options.names]
    width = max(len(fault.name) for fault in chosen)
    if options.list:
        for fault in chosen:
            print(f"{fault.name:{width}}  {fault.target}  {' '.join(fault.tests)}")
        return 0
    if not options.no_green:
        tests = sorted({test for fault in chosen for test in fault.tests})
        code, output = run_pytest(tests, {}, ROOT, TIMEOUT_S * 4)
        if code != 0:
            print(output, "\nthe tests are not green without a fault", sep="")
            return 1
        print(f"{'(no fault)':{width}}  green", flush=True)
    missed = 0
    with ThreadPoolExecutor(max(1, options.workers)) as pool:
        for verdict in pool.map(judge, chosen):
            missed += bool(verdict.problem)
            head = f"{verdict.fault.name:{width}}  {verdict.problem or 'red'}"
            print(f"{head}  ({verdict.seconds:.0f} s)", flush=True)
            if verdict.problem:
                print("\n".join(f"    {line}" for line in verdict.output.splitlines()[-15:]), flush=True)
    print(f"{len(chosen) - missed} of {len(chosen)} faults turned their tests red")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
