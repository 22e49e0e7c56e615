"""What is planned for: the shape of a model's KV, from its configuration or from flags."""

from dataclasses import dataclass
from pathlib import Path

from worker_svc.loader.resolve import BUNDLED, Progress, bundled_gguf, read_hf_config
from worker_svc.models.config import ModelConfig
from worker_svc.plan.settings import PlanSettings


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What of a model decides how much memory it takes."""

    name: str
    num_layers: int
    num_kv_heads: int
    head_size: int
    num_parameters: int | None  # None: not known
    max_model_len: int | None  # tokens; None: not known

    @property
    def description(self) -> str:
        """The name and the shape in words."""
        return f"{self.name}: {self.num_layers} layers, {self.num_kv_heads} KV heads of size {self.head_size}"


def read_shape(settings: PlanSettings, progress: Progress) -> ModelShape:
    """Return the shape that the flags give or that the model's configuration holds. Raises ModelError."""
    if settings.layers and settings.kv_heads and settings.head_size:
        return ModelShape(
            name="the given shape",
            num_layers=settings.layers,
            num_kv_heads=settings.kv_heads,
            head_size=settings.head_size,
            num_parameters=settings.parameters,
            max_model_len=None,
        )
    model = settings.model or BUNDLED
    config = ModelConfig.from_hf(read_hf_config(model, progress))
    return ModelShape(
        name=_short_name(model),
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_size=config.head_size,
        num_parameters=settings.parameters or config.num_parameters,
        max_model_len=config.max_position_embeddings,
    )


def _short_name(model: str) -> str:
    path = bundled_gguf() if model == BUNDLED else Path(model).expanduser()
    if not path.exists():
        return model  # a Hub id
    return path.stem if path.is_file() else path.resolve().name
