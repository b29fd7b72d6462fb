"""A worker of verl whose actor runs on `engine.OBLREngine`."""

from __future__ import annotations

import os
from typing import Any

from omegaconf import OmegaConf
from verl.single_controller.base.decorator import Dispatch, register
from verl.workers.engine_workers import ActorRolloutRefWorker, TrainingWorker

from oblrpo.adapters.verl.engine import VENDOR, OBLREngine
from oblrpo.adapters.verl.settings import read_settings

ENGINE_VENDOR = "VERL_ENGINE_VENDOR"


class OBLRTrainingWorker(TrainingWorker):  # type: ignore[misc]
    """A training worker on our engine; the reference model beside it keeps the engine of verl."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        before = os.environ.get(ENGINE_VENDOR)
        os.environ[ENGINE_VENDOR] = VENDOR  # read by verl where it looks the engine up, and nowhere else
        try:
            super().__init__(*args, **kwargs)
        finally:
            del os.environ[ENGINE_VENDOR]
            if before is not None:
                os.environ[ENGINE_VENDOR] = before
        if not isinstance(self.engine, OBLREngine):
            raise TypeError(f"oblrpo: verl gave the actor a {type(self.engine).__name__} in place of OBLREngine.")


class OBLRWorker(ActorRolloutRefWorker):  # type: ignore[misc]
    """The worker `ActorRolloutRefWorker` with that actor; `config.oblrpo` holds the adapter's settings."""

    actor_worker_cls = OBLRTrainingWorker

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)  # type: ignore[untyped-decorator]
    def init_model(self) -> None:
        """Build the models as verl does, then hand the adapter's settings to the engine."""
        super().init_model()
        if self.actor is not None:
            settings = read_settings(OmegaConf.to_container(self.config.oblrpo))
            self.actor.engine.configure(settings, self.config.rollout.max_model_len or 0)
