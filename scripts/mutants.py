"""Break the package on purpose, one line at a time, and see whether the tests notice.

scripts/mutants.yaml lists the mutants: the file, the text and what takes its place, what a user would suffer, and the
tests that are to notice. Each is applied to a copy of the checkout. Arguments choose mutants: a part of a file's name
or of the text. Exits with 1 if one survives.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import yaml
from beside import environment as environment_of
from peers import PEERS
from rich.console import Console
from rich.progress import track
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
TIMEOUT_SECONDS = 600


@dataclass(frozen=True)
class Mutant:
    file: str
    before: str
    after: str
    suffers: str
    tests: str
    peer: str = ""  # in whose environment of `make test-peers` the tests run

    @property
    def title(self) -> str:
        return f"{self.file}: {self.before.strip()} -> {self.after.strip() or '(nothing)'}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("chosen", nargs="*", help="parts of titles; all mutants without one")
    parser.add_argument("--list", type=Path, default=ROOT / "scripts" / "mutants.yaml", help="the list of mutants")
    parser.add_argument("--root", type=Path, default=ROOT, help="the checkout to break a copy of")
    parser.add_argument("--jobs", type=int, default=2, help="mutants at a time")
    arguments = parser.parse_args()
    mutants = [Mutant(**entry) for entry in yaml.safe_load(arguments.list.read_text())]
    for mutant in mutants:
        if (arguments.root / mutant.file).read_text().count(mutant.before) != 1:
            raise SystemExit(f"{mutant.title}: this text must be in the file exactly once")
    mutants = [m for m in mutants if not arguments.chosen or any(part in m.title for part in arguments.chosen)]
    console, results = Console(stderr=True, soft_wrap=True), []
    with ThreadPoolExecutor(arguments.jobs) as pool:
        ended = pool.map(lambda mutant: survives(mutant, arguments.root), mutants)
        for mutant, (survived, by) in zip(mutants, track(ended, "mutants", total=len(mutants), console=console)):
            results.append((survived, by))
            console.print(f"{'SURVIVED' if survived else 'killed'}: {mutant.title}", highlight=False, markup=False)
    table = Table("mutant", "what a user would suffer", "noticed by")
    for mutant, (survived, by) in zip(mutants, results):
        table.add_row(mutant.title, mutant.suffers, f"[red]nothing: {by}" if survived else by)
    Console(width=None if sys.stdout.isatty() else 200).print(table)
    survivors = sum(survived for survived, _ in results)
    print(f"{len(mutants) - survivors} of {len(mutants)} killed")
    raise SystemExit(bool(survivors))


def survives(mutant: Mutant, original: Path) -> tuple[bool, str]:
    """Whether the tests of ``original`` pass in spite of it; and the first that does not, or how they ended."""
    with tempfile.TemporaryDirectory(prefix="lwopt-mutant-") as folder:
        root = Path(folder, "checkout")
        shutil.copytree(
            original, root, ignore=shutil.ignore_patterns(".git", ".venv", ".make", "runs", "__pycache__", ".*_cache")
        )
        # An editable install takes the integrations from their folder; this one is to have its own.
        (root / "lwopt_backend" / "integrations").symlink_to(root / "integrations")
        file = root / mutant.file
        file.write_text(file.read_text().replace(mutant.before, mutant.after))
        environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        python = environment_of(mutant.peer, PEERS[mutant.peer]) if mutant.peer else sys.executable
        command = [python, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *shlex.split(mutant.tests)]
        try:
            ended = subprocess.run(
                command, cwd=root, env=environment, capture_output=True, text=True, timeout=TIMEOUT_SECONDS
            )
        except subprocess.TimeoutExpired:
            return False, f"nothing went on for {TIMEOUT_SECONDS} s"
    if ended.returncode == 0:
        return True, ended.stdout.strip().splitlines()[-1]
    failed = [line for line in ended.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    if ended.returncode not in (1, 2) or not failed:
        raise SystemExit(f"{mutant.title}: pytest could not run {mutant.tests}\n{ended.stdout}{ended.stderr}")
    return False, failed[0].split(" - ")[0].removeprefix("FAILED ")


if __name__ == "__main__":
    main()
