"""Run tests with the oldest DeepSpeed that is supported: those that depend on DeepSpeed, or those that are named.

It is installed beside the other one, in a folder of its own under .make and without dependencies: the other's, torch
among them, serve both. The folder comes first on PYTHONPATH, which the ranks that tests start inherit. Arguments are
pytest's. Run it with the interpreter that `make` prepared; a second run installs nothing.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from lwopt_backend.integrations.deepspeed_names import OLDEST

ROOT = Path(__file__).resolve().parent.parent
FILES = ["deepspeed_names", "zero_equality", "zero_checkpoint", "zero_schedulers", "zero_refusals"]
# On two ranks; other numbers are the newest one's. Not stage 3: with gloo, 0.19.7 uses parameters before all of them
# are gathered, because it waits for the last handle only; 0.19.8 waits for every one.
CHOSEN = ["-k", "not 1rank and not 4ranks and not [3 and not -3- and not s-3]"]


def main() -> None:
    folder = install()
    print(f"tests with DeepSpeed {OLDEST}, the oldest that is supported", file=sys.stderr, flush=True)
    paths = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "DEEPSPEED_UNDER_TEST": OLDEST}
    chosen = sys.argv[1:] or [*(f"tests/test_{name}.py" for name in FILES), *CHOSEN]
    pytest = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *chosen]
    code = subprocess.run(pytest, cwd=ROOT, env=environment).returncode
    if code != 0:
        raise SystemExit(f"failed with DeepSpeed {OLDEST} (make test-oldest runs this part alone)")


def install() -> Path:
    """The folder that has the oldest DeepSpeed; it exists only once it is complete."""
    folder = ROOT / ".make" / f"deepspeed-{OLDEST}"
    if folder.exists():
        return folder
    print(f"installing deepspeed=={OLDEST} into {folder.relative_to(ROOT)}", file=sys.stderr, flush=True)
    unfinished = folder.with_name(folder.name + ".tmp")
    shutil.rmtree(unfinished, ignore_errors=True)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    # Without build isolation, in which pip would fetch a second torch; the tools to build it are installed.
    pip += ["--no-deps", "--no-build-isolation", "--target", str(unfinished), f"deepspeed=={OLDEST}"]
    if subprocess.run(pip, stdout=sys.stderr).returncode != 0:
        raise SystemExit("pip failed, see above; running make again tries again")
    os.replace(unfinished, folder)
    return folder


if __name__ == "__main__":
    main()
