"""Files of what is expected of a case."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tests.goldens.facts import module_facts, plan_facts, shaping_facts
from tests.goldens.planned import FOLDER, Case


def read(case: Case) -> Mapping[str, Any]:
    return json.loads((FOLDER / "expected" / f"{case.key}.json").read_text())


def write(case: Case) -> None:
    """What is true now."""
    plans = {share: plan_facts(case, share) for share in case.budgets or ()}
    document: dict[str, Any] = {"module": module_facts(case), "plans": plans}
    if case.partitioned is not None:
        document["shaped"] = shaping_facts(case)
    path = FOLDER / "expected" / f"{case.key}.json"
    path.write_text(json.dumps(document, indent=1) + "\n")
