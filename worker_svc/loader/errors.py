"""What can go wrong between `--model` and tensors. Each message is one line for the person who typed the command."""


class ModelError(Exception):
    """A model cannot be found, read or imported."""


class ModelNotFoundError(ModelError):
    """Nothing is where `--model` points."""


class HubError(ModelError):
    """The Hugging Face Hub did not give the model."""


class GgufError(ModelError):
    """A GGUF file is damaged, or holds what the import does not support."""


class CheckpointError(ModelError):
    """A model folder's weights are incomplete or damaged."""


class MissingTensorError(CheckpointError):
    """A tensor that the model needs is not among the folder's weights."""
