"""A rank that something happens to, and that notes its parameters when all steps are done.

As `benchmarks.faults.rank`; parameters are hashed into ``<folder>/<device>.parameters``.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.faults.rank import main
from planner.executor.elastic.elastic_run import ElasticRun
from planner.executor.launch.process import exit_now


def _note_parameters(folder: Path) -> None:
    usual = ElasticRun.train

    def train(elastic: ElasticRun, *args: Any) -> Any:
        last = usual(elastic, *args)
        model_stage, digest = elastic._model_stage, hashlib.sha256()
        assert model_stage is not None
        for parameter in model_stage.parameters:
            digest.update(parameter.detach().numpy().tobytes())
        name = elastic.ranks.name(elastic.ranks.rank).replace("/", "-")
        (folder / f"{name}.parameters").write_text(digest.hexdigest())
        return last

    setattr(ElasticRun, "train", train)  # noqa: B010


if __name__ == "__main__":
    _note_parameters(Path(json.loads(sys.argv[1])["folder"]))
    exit_now(main(sys.argv[1:]))
