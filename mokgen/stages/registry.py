"""Every stage kind by name."""

from __future__ import annotations

from mokgen.stages import fc1, fc2, reduce, route, schedule, shared
from mokgen.stages.base import StageDef

STAGES: dict[str, StageDef] = {
    stage.name: stage
    for stage in (route.STAGE, schedule.STAGE, shared.FC1, fc1.STAGE, shared.FC2, fc2.STAGE, reduce.STAGE)
}
