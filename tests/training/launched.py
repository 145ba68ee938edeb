"""The job as ``accelerate launch -m tests.training.launched FOLDER JSON`` runs it: the JSON holds changed settings."""

from __future__ import annotations

import json
import os
import sys

from torch.distributed.tensor import DTensor

from tests.training.jobs import job


def shard_on_the_cpu() -> None:
    """Accelerate silently turns FSDP on a CPU into DDP; this makes it shard as on an accelerator."""
    from accelerate import PartialState
    from accelerate.utils import DistributedType

    PartialState(cpu=True)
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_XPU


if __name__ == "__main__":
    sharded = os.environ.get("ACCELERATE_USE_FSDP") == "true"
    if sharded:
        shard_on_the_cpu()
    model, _ = job(sys.argv[1], **json.loads(sys.argv[2]))
    assert all(isinstance(p, DTensor) == sharded for p in model.parameters())
