"""A failing assertion says on ranks, which are no processes of pytest's, what pytest makes it say."""

import pytest
from _pytest.assertion import assertstate_key, util


def rewrite() -> None:
    """To be called before any module of tests/ is imported that has assertions."""
    config = pytest.Config.fromdictargs({}, ["--noconftest"])
    config.stash[assertstate_key].hook.mark_rewrite("tests")

    def compared(op: str, left: object, right: object) -> str | None:
        for lines in config.hook.pytest_assertrepr_compare(config=config, op=op, left=left, right=right):
            return "\n~".join(line.replace("\n", "\\n") for line in lines).replace("%", "%%")
        return None

    util._reprcompare = compared
