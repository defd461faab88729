"""Policy and scalar models: loading, saving, and the forward passes that training and scoring share.

B = rows, L = longest row, D = hidden, V = vocabulary, N = chosen positions of all rows, packed.

Rows are always query then response from position 0, padded on the right. Under causal attention no token sees
the padding, so no mask is built, and absolute and rotary positions are right by construction.
"""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from fastrlhf_kernels import linear_token_logprobs
from torch import Tensor, nn
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.utils import logging

from fastrlhf.errors import UserError, brief, did_you_mean

if TYPE_CHECKING:
    from fastrlhf.config import ModelConfig

__all__ = [
    "ScalarModel",
    "ScalarModelConfig",
    "check_head",
    "check_shape",
    "disable_dropout",
    "hidden_states",
    "load_policy",
    "load_scalar_model",
    "move",
    "packed_logprobs",
    "policy_from_config",
    "require_folder",
    "resolve_device",
    "scalar_from_policy",
]


Model = TypeVar("Model", bound=PreTrainedModel)


def resolve_device(name: str) -> torch.device:
    """auto, cpu, cuda or cuda:N -> device. Raises `UserError` for a device that is not there."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as err:
        raise UserError(f"model.device: {name!r} is not a device; use auto, cpu or cuda") from err
    if device.type not in ("cpu", "cuda"):
        raise UserError(f"model.device: {name} is not supported; use auto, cpu or cuda")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UserError(f"model.device: {name} was asked for, but torch sees no CUDA device; use model.device: cpu")
    return device


def move(model: Model, device: str) -> Model:
    """`model` on the device that `resolve_device` makes of the name."""
    return cast(Model, nn.Module.to(model, resolve_device(device)))


def disable_dropout(model: nn.Module) -> None:
    """Dropout off everywhere (REFERENCE item 7): log-probabilities are reproducible and the first ratio is 1.

    Families keep rates in modules, in numbers on modules (`self.dropout`, `self.layerdrop`) and in the configuration,
    and read any of them at every call; `check_head` proves that none is left.
    """
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        _zero_rates(module, vars(module))
        config = getattr(module, "config", None)
        if isinstance(config, PretrainedConfig):
            _zero_rates(config, config.to_dict())


def _zero_rates(owner: object, fields: dict[str, Any]) -> None:
    for name in [name for name, value in fields.items() if "drop" in name and isinstance(value, float) and value]:
        setattr(owner, name, 0.0)


def _attn(attn: str) -> dict[str, str]:
    return {} if attn == "auto" else {"attn_implementation": attn}


def _dtype(name: str) -> torch.dtype:
    return cast(torch.dtype, getattr(torch, name))


def check_shape(shape: dict[str, Any], vocab_size: int = 1 << 20, eos_id: int | None = None) -> PretrainedConfig:
    """`model.from_scratch` -> transformers' configuration, with the vocabulary and the EOS of the tokenizer.

    Raises `UserError` for an unknown model type or field, or a shape that transformers refuses.
    """
    shape = dict(shape)
    model_type = shape.pop("model_type", None)
    if not isinstance(model_type, str):
        raise UserError("model.from_scratch has no model_type; add one, such as model_type: gpt_neox")
    if model_type not in CONFIG_MAPPING:
        near = did_you_mean(model_type, CONFIG_MAPPING.keys()) or "; use one that transformers knows, such as gpt_neox"
        raise UserError(f"model.from_scratch.model_type: unknown model type {model_type!r}{near}")
    known = AutoConfig.for_model(model_type)
    for name in ("bos_token_id", "eos_token_id"):
        given = shape.setdefault(name, eos_id)
        if name == "eos_token_id" and eos_id is not None and given != eos_id:
            raise UserError(
                f"model.from_scratch.eos_token_id is {given}, but the tokenizer's EOS is {eos_id}; leave it out"
            )
    try:
        config = AutoConfig.for_model(model_type, **{"vocab_size": vocab_size, **shape})
    except Exception as err:  # transformers checks a shape with whatever it has at hand
        raise UserError(f"model.from_scratch: {model_type} refuses this shape: {brief(err)}") from err
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UserError(f"model.from_scratch: {model_type} is not a causal language model; use one, such as gpt_neox")
    source = inspect.getsource(sys.modules[MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].__module__])
    for key in shape:
        # transformers keeps a field that it does not know as it is (one of an older version it takes and renames), and
        # some models read fields that their configurations do not declare.
        if hasattr(config, key) and not hasattr(known, key) and f'"{key}"' not in source:
            near = did_you_mean(key, known.to_dict())
            raise UserError(f"model.from_scratch: {model_type} has no field {key!r}{near}")
    return cast(PretrainedConfig, config)


def policy_from_config(
    shape: dict[str, Any], *, vocab_size: int, eos_id: int, dtype: str, attn: str, seed: int
) -> PreTrainedModel:
    """A causal LM with random weights drawn from `seed`; the global random state is left as it was.

    Raises `UserError` for an unknown model type or a shape that transformers refuses.
    """
    given = shape.get("vocab_size", vocab_size)
    if type(given) is not int or given < vocab_size:
        raise UserError(
            f"model.from_scratch.vocab_size is {shape['vocab_size']}, but the tokenizer has {vocab_size} ids; raise it"
        )
    config = check_shape(shape, vocab_size, eos_id)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        try:
            model = AutoModelForCausalLM.from_config(config, dtype=_dtype(dtype), **_attn(attn))
        except Exception as err:
            raise UserError(f"model.from_scratch: {config.model_type} refuses this shape: {brief(err)}") from err
    disable_dropout(model)
    return cast(PreTrainedModel, model)


def require_folder(path: str, field: str) -> None:
    """Refuse a local path that is no model folder."""
    try:
        if not (path.startswith((".", "/", "~")) or Path(path).exists()) or (Path(path) / "config.json").is_file():
            return
        parts = [part for part in ("ppo", "reward", "sft") if (Path(path) / part / "model" / "config.json").is_file()]
        wanted = "reward" if field == "ppo.reward_model" else "sft"
        if (Path(path) / "model" / "config.json").is_file():
            hint = f"; did you mean {path}/model?"
        elif parts:
            hint = f"; did you mean {path}/{wanted if wanted in parts else parts[0]}/model?"
        else:
            hint = ""
    except OSError as err:
        raise UserError(f"{field}: cannot read {path}: {err.strerror}") from err
    raise UserError(f"{field}: {path} is not a model folder (it has no config.json){hint}")


def load_policy(path: str, cfg: ModelConfig, *, attn: str = "auto", field: str = "model.path") -> PreTrainedModel:
    """A causal LM from a folder or hub id, with dropout off.

    Raises `UserError` when it is missing, of an unknown type, or lacks weights for its architecture.
    """
    require_folder(path, field)
    try:
        with _no_report():
            model, info = cast(Any, AutoModelForCausalLM).from_pretrained(
                path,
                dtype=_dtype(cfg.dtype),
                trust_remote_code=cfg.trust_remote_code,
                use_safetensors=True,  # a pickle from the outside can run code
                ignore_mismatched_sizes=True,  # refused below, by name
                output_loading_info=True,
                **_attn(attn),
            )
    except Exception as err:  # transformers checks a folder with whatever it has at hand
        raise UserError(f"{field}: cannot load a causal language model from {path}: {brief(err)}") from err
    _refuse_incomplete(info, path, field)
    return _ready(model, path, field)


@contextmanager
def _no_report() -> Iterator[None]:
    """Without transformers' table of missing and misshapen weights: our own sentence says it."""
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


def _ready(model: PreTrainedModel, path: str, field: str) -> PreTrainedModel:
    """Dropout off, and the weights finite and in memory of their own.

    As loaded they are a view into the file, at whatever address its header leaves them: matrix products over such
    addresses are slower and end in other bits than those of the model that was saved.
    """
    disable_dropout(model)
    for name, parameter in model.named_parameters():
        if not bool(parameter.detach().isfinite().all()):
            raise UserError(f"{field}: {path} holds weights that are not finite ({name}); use an earlier checkpoint")
        parameter.data = parameter.data.clone()
    return model


def _refuse_incomplete(info: dict[str, Any], path: str, field: str, allow_unexpected: bool = True) -> None:
    missing = sorted(info["missing_keys"])
    if missing:
        raise UserError(
            f"{field}: {path} lacks {len(missing)} weights (first: {missing[0]}); it is not a complete model"
        )
    mismatched = list(info["mismatched_keys"])
    if mismatched:
        raise UserError(
            f"{field}: {path} has weights of another shape than its config.json says (first: {mismatched[0]})"
        )
    unexpected = sorted(info["unexpected_keys"])
    if unexpected and not allow_unexpected:
        raise UserError(f"{field}: {path} holds weights that this model has no place for (first: {unexpected[0]})")


class ScalarModelConfig(PretrainedConfig):
    """Configuration of `ScalarModel`: the backbone's own configuration, the hidden size and the reward bias."""

    model_type = "scalar_model"

    def __init__(
        self, base_config: dict[str, Any] | None = None, hidden_size: int = 0, bias: float = 0.0, **kwargs: Any
    ) -> None:
        self.base_config = base_config.to_dict() if isinstance(base_config, PretrainedConfig) else base_config
        self.hidden_size = hidden_size
        self.bias = bias
        super().__init__(**kwargs)


def _backbone(base_config: dict[str, Any], attn: str) -> PreTrainedModel:
    config = AutoConfig.for_model(**base_config)
    return cast(PreTrainedModel, AutoModel.from_config(config, **_attn(attn)))


class ScalarModel(PreTrainedModel):
    """A causal backbone with a linear head to one number: reward model and critic (REFERENCE items 11, 12, 15, 22).

    The head starts from N(0, 1/(D+1)) (standard deviation 1/sqrt(D+1)), bias 0. `config.bias` is subtracted
    from every output.
    """

    config_class = ScalarModelConfig
    base_model_prefix = "lm_backbone"
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flash_attn_2 = True
    _supports_flex_attn = True
    _supports_attention_backend = True

    def __init__(self, config: ScalarModelConfig) -> None:
        super().__init__(config)
        if not config.base_config:
            raise UserError("this scalar model's config.json has no base_config, so its backbone is unknown")
        attn = getattr(config, "_attn_implementation", None)
        try:
            self.lm_backbone = _backbone(config.base_config, attn or "auto")
        except ValueError:
            if attn != "sdpa":
                raise
            # What transformers takes unless asked: this class cannot say for its backbone that it has none.
            self.lm_backbone = _backbone(config.base_config, "auto")
        self.scalar_head = nn.Linear(config.hidden_size, 1)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        if module is getattr(self, "scalar_head", None):
            nn.init.normal_(self.scalar_head.weight, std=(self.config.hidden_size + 1) ** -0.5)
            nn.init.zeros_(self.scalar_head.bias)

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, token_type_ids: Tensor | None = None
    ) -> Tensor:
        """[B,L] ids -> [B,L] rewards or values in at least fp32, one at every position.

        `attention_mask` [B,L] is 0 at padding, which belongs on the right and is never embedded: its id may lie beyond
        the embedding. `token_type_ids`, which some tokenizers add, mean nothing here.
        """
        if attention_mask is not None:
            input_ids = input_ids.masked_fill(attention_mask == 0, 0)
        return self.head(hidden_states(self.lm_backbone, input_ids, attention_mask))

    def head(self, hidden: Tensor) -> Tensor:
        """[..., D] hidden states -> [...] values in at least fp32, bias subtracted."""
        value = self.scalar_head(hidden).squeeze(-1)
        return (value if value.dtype == torch.float64 else value.float()) - self.config.bias


# Known to transformers, the folder of a scalar model loads without warnings, its tokenizer too.
AutoConfig.register(ScalarModelConfig.model_type, ScalarModelConfig, exist_ok=True)
AutoModel.register(ScalarModelConfig, ScalarModel, exist_ok=True)


def scalar_from_policy(policy: PreTrainedModel, *, generator: torch.Generator) -> ScalarModel:
    """A scalar model whose backbone starts as a copy of the policy's; the head is drawn from `generator`."""
    base_config = policy.config.to_dict()
    hidden = cast(nn.Linear, policy.get_output_embeddings()).weight.shape[1]  # OPT-350m's is not its hidden_size
    with torch.random.fork_rng():
        attn = policy.config._attn_implementation
        model = ScalarModel(ScalarModelConfig(base_config=base_config, hidden_size=hidden, attn_implementation=attn))
    backbone = policy.base_model
    model.lm_backbone.load_state_dict(backbone.state_dict())
    std = (hidden + 1) ** -0.5
    with torch.no_grad():
        model.scalar_head.weight.copy_(torch.randn(1, hidden, generator=generator) * std)
        model.scalar_head.bias.zero_()
    first = next(policy.parameters())
    nn.Module.to(model, first.device, first.dtype)
    model.lm_backbone.config._attn_implementation = policy.config._attn_implementation
    disable_dropout(model)
    return model


def load_scalar_model(
    path: str, cfg: ModelConfig, *, attn: str = "auto", field: str = "ppo.reward_model"
) -> ScalarModel:
    """A `ScalarModel` from a folder or hub id, strict about missing and unexpected weights, dropout off."""
    require_folder(path, field)
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=cfg.trust_remote_code)
        if not isinstance(config, ScalarModelConfig) or not config.base_config:
            raise UserError(
                f"{field}: {path} is not a reward model written by `fastrlhf reward` (no base_config in config.json)"
            )
        with _no_report():
            model, info = cast(Any, ScalarModel).from_pretrained(
                path,
                config=config,
                dtype=_dtype(cfg.dtype),
                use_safetensors=True,
                ignore_mismatched_sizes=True,
                output_loading_info=True,
                **_attn(attn),
            )
    except UserError:
        raise
    except Exception as err:
        raise UserError(f"{field}: cannot load a reward model from {path}: {brief(err)}") from err
    _refuse_incomplete(info, path, field, allow_unexpected=False)
    if attn not in ("auto", model.lm_backbone.config._attn_implementation):
        raise UserError(f"attn: {type(model.lm_backbone).__name__} in {path} does not support {attn}; use attn: auto")
    return cast(ScalarModel, _ready(model, path, field))


def frozen_copy(model: PreTrainedModel) -> PreTrainedModel:
    """A copy for scoring: no gradients, evaluation mode."""
    return copy.deepcopy(model).requires_grad_(False).eval()


def hidden_states(backbone: nn.Module, ids_BL: Tensor, attention_mask_BL: Tensor | None = None) -> Tensor:
    """[B,L] ids -> [B,L,D] last hidden states, final norm applied. A mask is needed only for padding on the left."""
    output = backbone(input_ids=ids_BL, attention_mask=attention_mask_BL, use_cache=False, return_dict=True)
    return cast(Tensor, output.last_hidden_state)


def packed_logprobs(
    policy: PreTrainedModel,
    hidden_BLD: Tensor,
    positions_N: Tensor,
    ids_N: Tensor,
    *,
    temperature: float = 1.0,
    return_entropy: bool = False,
    backend: str = "auto",
) -> Any:
    """Log-probabilities of ids_N at positions_N (indices into the flattened [B*L]), without a [B,L,V] tensor.

    Returns fp32 [N], or `(logprobs, entropy)` with `return_entropy`.
    """
    head = cast(nn.Linear, policy.get_output_embeddings())
    hidden_ND = hidden_BLD.flatten(0, 1).index_select(0, positions_N)
    return linear_token_logprobs(
        hidden_ND,
        head.weight,
        ids_N,
        bias=getattr(head, "bias", None),
        softcap=getattr(policy.config.get_text_config(), "final_logit_softcapping", None),
        temperature=temperature,
        return_entropy=return_entropy,
        backend=backend,
    )


@torch.no_grad()
def check_head(policy: PreTrainedModel, field: str = "model.path") -> None:
    """Prove on eight tokens what all stages build on; `UserError` for a family of which it does not hold.

    Backbone and output projection give the model's own logits (some families scale or shift them afterwards), no token
    sees the next one, and training mode computes what evaluation mode does. Without that training would be silently
    wrong.
    """
    family = type(policy).__name__
    if policy.get_output_embeddings() is None:
        raise UserError(f"{field}: {family} has no output projection; use a causal language model")
    training = policy.training
    vocab = cast(nn.Embedding, policy.get_input_embeddings()).weight.shape[0]
    ids_BL = (torch.arange(8, device=policy.device) * 37 % vocab)[None]
    positions = torch.arange(7, device=policy.device)
    try:
        policy.eval()
        logits = policy(input_ids=ids_BL, use_cache=False).logits.float()
        hidden_BLD = hidden_states(policy.base_model, ids_BL)
        prefix_BLD = hidden_states(policy.base_model, ids_BL[:, :4])
        policy.train()
        trained_BLD = hidden_states(policy.base_model, ids_BL)
        ours = packed_logprobs(policy, hidden_BLD, positions, ids_BL[0, 1:])
    except Exception as err:  # whatever a family's code raises when called in this way
        raise UserError(f"{field}: {family} cannot be trained here: {brief(err)}") from err
    finally:
        policy.train(training)
    logprobs = torch.log_softmax(logits[0, :-1], -1).gather(1, ids_BL[0, 1:, None])[:, 0]
    limit = 1e-3 if policy.dtype == torch.float32 else 0.2
    size = hidden_BLD.abs().max().float()
    errors = {
        "does more to its logits than project them": (ours - logprobs).abs().max(),
        "lets tokens see those after them": (prefix_BLD - hidden_BLD[:, :4]).abs().max() / size,
        "computes something else in training than in evaluation": (trained_BLD - hidden_BLD).abs().max() / size,
    }
    for what, error in errors.items():
        if not bool(error <= limit):
            raise UserError(f"{field}: {family} {what} (by {float(error):.2g}); this family is not supported")
