"""`ServerArgs`: what the user asked for, and the steps by which SGLang resolves it."""

from __future__ import annotations

import copy
import json
import logging
from argparse import ArgumentParser
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from sglang_pat.compat import registry

logger = logging.getLogger(__name__)


def with_config_file(parser: ArgumentParser, words: list[str]) -> list[str]:
    """Words of a command line of SGLang's server, with those of the file in place of `--config`, so that other flags win over them.

    Raises:
        OSError, ValueError, yaml.YAMLError: There is no such file, or it is no file of flags.
    """
    if "--config" not in words:
        return words
    try:
        from sglang.srt.utils.server_args_config_parser import ConfigArgumentMerger
    except ImportError:  # 0.5.17
        from sglang.srt.server_args_config_parser import ConfigArgumentMerger
    return list(ConfigArgumentMerger(parser).merge_config_with_args(words))


def resolved(server_args: Any) -> Any:
    """`ServerArgs` with SGLang's decisions applied: 0.5.23 stores these apart from what the user gave."""
    from sglang.srt.server_args import ServerArgs

    try:
        from sglang.srt.arg_groups.model_override_base import resolving_view
    except ImportError:
        return server_args
    return resolving_view(server_args) if isinstance(server_args, ServerArgs) else server_args


def prefill_step(server_args: Any, context: int) -> int:
    """Tokens that a request prefills in one step, at most: a chunk, or as many as its context has."""
    chunk = resolved(server_args).chunked_prefill_size or 0
    return min(chunk, context) if chunk > 0 else context


def of_this_process() -> Any:
    """The `ServerArgs` of this process."""
    from sglang.srt.runtime_context import get_server_args

    return get_server_args()


def backends_chosen(server_args: Any) -> tuple[str | None, str | None]:
    """The attention backends for prefill and for decode; None where nobody chose one."""
    chosen = resolved(server_args)
    both = chosen.attention_backend
    return chosen.prefill_attention_backend or both, chosen.decode_attention_backend or both


def chooses_pat(server_args: Any) -> bool:
    """Whether `pat` was chosen for anything. No where this SGLang does not let it be told: servers with other backends must go on, and one with `pat`
    is refused once it asks for its backend, if it lacks what was to be done for it (`support.check_guards`)."""
    try:
        return "pat" in backends_chosen(server_args)
    except Exception:
        logger.debug("sglang-pat cannot tell which attention backend was chosen", exc_info=True)
        return False


def mixes_steps_elsewhere(server_args: Any) -> bool:
    """Whether requests that decode gain tokens in mixed steps that their planner does not plan: where another backend than that for decode runs prefill,
    and so mixed steps whole; and where drafts are verified, which has plans of its own, beside mixed steps, which decode single tokens (0.5.23)."""
    prefill, decode = backends_chosen(server_args)
    return bool(resolved(server_args).enable_mixed_chunk) and (prefill != decode or draft_tokens(server_args) > 0)


def draft_tokens(server_args: Any) -> int:
    """Tokens of each request that a step verifies; 0 without speculation."""
    given = resolved(server_args)
    return (given.speculative_num_draft_tokens or 1) if getattr(given, "speculative_algorithm", None) else 0


def is_deterministic(server_args: Any) -> bool:
    """Whether a request's answer has to have the same bits in any batch."""
    return bool(getattr(resolved(server_args), "enable_deterministic_inference", False))


def decide(server_args: Any, **arguments: Any) -> None:
    """Change arguments while SGLang resolves them. 0.5.23 keeps what is decided apart from what the user gave."""
    from sglang.srt.server_args import ServerArgs

    try:
        from sglang.srt.arg_groups.overrides import declare_resolution
    except ImportError:
        declare_resolution = None
    if declare_resolution is not None and isinstance(server_args, ServerArgs):
        declare_resolution(server_args, "sglang-pat", **arguments)
        return
    for name, value in arguments.items():
        setattr(server_args, name, value)


def disable_graphs(server_args: Any, *phases: str) -> None:
    """Turn device graphs of these phases (`prefill`, `decode`) off, after SGLang has decided about graphs."""
    from sglang.srt.model_executor.cuda_graph_config import Backend

    config = copy.deepcopy(resolved(server_args).cuda_graph_config)
    if config is None:
        return
    for phase in phases:
        getattr(config, phase).backend = Backend.DISABLED
    decide(server_args, cuda_graph_config=config)


def has_one_pool() -> bool:
    """Whether SGLang can make no pool for windows on a plugin's platform: up to 0.5.21 it asks that platform for one kind of pool only
    (kv_cache_configurator.py, `_build_oot_mha_kv_pool`)."""
    from sglang.srt.platforms.interface import SRTPlatform

    return not hasattr(SRTPlatform, "get_kv_pool_cls")


def use_one_pool(server_args: Any) -> None:
    """Keep the KV of all layers in one pool where there can be no other."""
    if has_one_pool():
        server_args.disable_hybrid_swa_memory = True


def back_up_in_plain_memory(server_args: Any) -> None:
    """Keep the KV of requests that a decode server retracts in plain memory, if nobody chose where: 0.5.23 would pin memory, which needs a GPU."""
    name, given = "disaggregation_decode_retraction_backup", resolved(server_args)
    if getattr(given, "disaggregation_mode", None) == "decode" and getattr(given, name, "") is None:
        decide(server_args, **{name: "cpu_tensor"})


def choose_grammar_backend(server_args: Any) -> None:
    """Choose a grammar backend that computes on a CPU if nobody chose one.

    SGLang's default, xgrammar, pins memory, which needs a GPU: the first request with a JSON schema or a regular expression would end the server. llguidance
    has to know the kind of the tokenizer, and tokens that end an answer, or no server would start with it; without it such requests are refused. So they
    are where drafts are verified: there SGLang lets an expression that llguidance cannot compute (`a{1000000}`) end the server.
    """
    if server_args.grammar_backend is None:
        computes = not draft_tokens(server_args) and _grammars_are_computed(server_args)
        server_args.grammar_backend = "llguidance" if computes else "none"
        if not computes:
            logger.warning(
                "sglang-pat: requests with a JSON schema or another grammar are refused: see docs/crashes.md"
            )


def _grammars_are_computed(server_args: Any) -> bool:
    """Whether llguidance takes the model's tokenizer, with the model's vocabulary and ends of answers. Files are fetched if need be, as the server
    needs them next."""
    if server_args.tokenizer_mode == "slow":
        return False
    try:
        from llguidance import LLTokenizer

        model = server_args.model_path
        tokenizer = _model_file(server_args.tokenizer_path or model, "tokenizer.json", server_args)
        config, generation = (
            json.loads(_model_file(model, name, server_args) or "{}")
            for name in ("config.json", "generation_config.json")
        )
        ends = [found for one in (config, generation) if (found := one.get("eos_token_id")) is not None]
        LLTokenizer(
            tokenizer,
            n_vocab=(config.get("text_config") or config).get("vocab_size"),
            eos_token=sorted({end for found in ends for end in (found if isinstance(found, list) else [found])}),
        )
    except Exception as error:  # whatever a library says of a file that it does not know
        logger.info("llguidance cannot be used with this model: %s", error)
        return False
    return True


def _model_file(model: str, name: str, server_args: Any) -> str:
    """Text of a file of a local or remote model; empty if there is none."""
    from transformers.utils import cached_file

    path = cached_file(
        model, name, revision=server_args.revision, _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )  # fmt: skip
    return Path(path).read_text() if path else ""


LISTED = "fa3"
"""An attention backend that is in every one of SGLang's lists of backends for a model."""

DRAFTED = ("EAGLE", "EAGLE3", "NEXTN", "STANDALONE")
"""Algorithms whose drafts are a model's, and may branch."""

TREES_IN_PAGES = "flashinfer"
"""The attention backend that SGLang lets verify branching drafts of any algorithm in pages of several tokens (speculative_hook.py)."""

LISTING = ("GptOssForCausalLM", "Exaone4ForCausalLM", "ExaoneMoEForCausalLM", "ExaoneMoeForCausalLM")
"""Models that `pat` serves, and for which SGLang accepts only backends from a list that no plugin can extend (server_args.py,
`_handle_model_specific_adjustments`; in 0.5.23 arg_groups/model_hook.py)."""


def model_config(server_args: Any) -> Any:
    """SGLang's `ModelConfig` of the model, before it is loaded; None if SGLang reads none here either."""
    if server_args.model_path.startswith("instance://"):
        return None
    if hasattr(server_args, "get_model_config"):
        return server_args.get_model_config()
    from sglang.srt.arg_groups.model_override_base import model_config_of

    return model_config_of(server_args)


def lists_backends(server_args: Any) -> bool:
    """Whether the model is one of LISTING."""
    config = model_config(server_args)
    return config is not None and config.hf_config.architectures[0] in LISTING


def branches_in_pages(server_args: Any) -> bool:
    """Whether drafts, of a model or of n-grams, may branch, and KV is kept in pages of several tokens.

    SGLang's lists are for the backend that makes drafts: a branch begins within a page there. On a CPU `pat` makes them by slots; on a GPU the stock
    backends that make them for it are those of the list, unless another was chosen for them.
    """
    given = resolved(server_args)
    algorithm = (getattr(given, "speculative_algorithm", None) or "").upper()
    branching = algorithm == "NGRAM" or (given.speculative_eagle_topk or 1) > 1
    drafts = getattr(given, "speculative_draft_attention_backend", None)
    listed = drafts in (None, "pat", "flashinfer", "fa3", "triton")
    return algorithm in (*DRAFTED, "NGRAM") and branching and listed and (given.page_size or 1) > 1


@contextmanager
def shown_as(server_args: Any, backend: str, shown: str) -> Iterator[None]:
    """Within the block, make `server_args` name `shown` wherever it named `backend`."""
    write = msgspec.Struct.__setattr__ if isinstance(server_args, msgspec.Struct) else object.__setattr__
    names = ("attention_backend", "prefill_attention_backend", "decode_attention_backend")
    changed = [name for name in names if getattr(server_args, name) == backend]
    for name in changed:
        write(server_args, name, shown)
    try:
        yield
    finally:
        for name in changed:
            write(server_args, name, backend)


_ADJUSTMENTS = "handle_model_specific_adjustments"


def around_model_adjustments(hook: Callable[[Callable[[Any], None], Any], None]) -> None:
    """Call `hook(step, server_args)` in place of `step`, SGLang's adjustment of the arguments to the model."""
    _around(_ADJUSTMENTS, _adjustments_of_old, hook)


def around_speculation(hook: Callable[[Callable[[Any], None], Any], None]) -> None:
    """Call `hook(step, server_args)` in place of `step`, SGLang's decisions about speculative decoding."""
    name = "handle_speculative_decoding"
    _around(name, lambda: f"sglang.srt.arg_groups.speculative_hook:.{name}", hook)


def _around(name: str, old: Callable[[], str], hook: Callable[[Callable[[Any], None], Any], None]) -> None:
    """Hook a step of SGLang's resolution by its name, or what `old` says, up to 0.5.19."""
    try:
        from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook
    except ImportError:
        registry.hook(old(), hook, around=True)
        return
    try:
        register_resolution_hook(name)(lambda args, step: hook(step, args))
    except Exception as error:  # for names of no step
        # Every server loads this plugin, and few need it.
        logger.info("sglang-pat cannot take part in %s: %s", name, error)


def adjustments_problem() -> str:
    """Why `around_model_adjustments` is without effect; empty if it has one."""
    try:
        from sglang.srt.arg_groups import resolution_hooks
    except ImportError:
        return registry.problem(_adjustments_of_old())
    return "" if _ADJUSTMENTS in resolution_hooks._HOOKS else f"this SGLang has no step {_ADJUSTMENTS}"


def _adjustments_of_old() -> str:
    """What is hooked up to 0.5.19, in which it became a function."""
    method = f"sglang.srt.server_args:ServerArgs._{_ADJUSTMENTS}"
    return method if registry.exists(method) else f"sglang.srt.arg_groups.model_hook:.{_ADJUSTMENTS}"


def why_no_answers(server_args: Any) -> str:
    """Why an `sglang.Engine` with these arguments would answer no chat and no completion, though a server might; empty if it would."""
    from sglang import Engine

    given = resolved(server_args)
    mode = given.disaggregation_mode
    # Releases in which other processes can join an engine (0.5.21 on) give it a tokenizer in this process too.
    joinable = hasattr(Engine, "attach_tokenizer_worker")
    reasons = {
        f"--node-rank {given.node_rank}: a job runs on node 0, and SGLang's server on the others": given.node_rank > 0,
        "--tokenizer-worker-num: an engine of this SGLang has one tokenizer only; start a server, and name it with --url": (
            given.tokenizer_worker_num > 1 and not joinable
        ),
        "--skip-tokenizer-init: nobody would make text of answers": given.skip_tokenizer_init,
        f"--disaggregation-mode {mode}: it is one half of a server; name their router with --url": mode != "null",
        "--encoder-only: it generates nothing": given.encoder_only,
        "--is-embedding: it generates nothing": given.is_embedding,
        "--use-ray: only a server uses Ray; start one, and name it with --url": given.use_ray,
    }
    return next((reason for reason, applies in reasons.items() if applies), "")


def handle_failed_start(server_args: Any, handler: Callable[[int, Any], None]) -> None:
    """Let this function handle the signal by which SGLang's processes tell the one that started them that they have failed.

    It has to be one that can be imported: SGLang copies its arguments to these processes.
    """
    try:
        server_args.custom_sigquit_handler = handler
    except AttributeError:
        # 0.5.17 lets nobody assign arguments that are resolved; on this one nothing depends.
        object.__setattr__(server_args, "custom_sigquit_handler", handler)
