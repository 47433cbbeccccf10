"""The flags of `penstock train`, one a setting. None has a value unless it is given: see `train/settings.py`."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from penstock.cli.output import TOKENIZER_HELP


@dataclass(frozen=True, slots=True)
class Flag:
    """A flag and the setting of the same name."""

    name: str
    kind: type
    panel: str
    help: str
    """Ends with the default, in parentheses, where there is one to speak of."""
    also: tuple[str, ...] = ()
    """Other spellings."""

    @property
    def parameter(self) -> inspect.Parameter:
        dashed = "--" + self.name.replace("_", "-")
        spelled = f"{dashed}/--no-{dashed[2:]}" if self.kind is bool else dashed
        option = typer.Option(spelled, *self.also, help=self.help, rich_help_panel=self.panel, show_default=False)
        return inspect.Parameter(
            self.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[self.kind | None, option]
        )


_DATASET = "a block store, a file, a folder, a glob, hf://name[:config[:split]] or s3://..."

FLAGS = (
    Flag("dataset_file", str, "Data", f"The data set: {_DATASET}"),
    Flag("dataset_chunk_size", str, "Data", "Samples a chunk, or auto: by memory (4000)"),
    Flag("batch_size", int, "Data", "Sequences a step; with --parallel-independent, of each worker (8)"),
    Flag("max_seq_len", int, "Data", "Tokens a sequence (256)"),
    Flag("gradient_accumulation_steps", int, "Data", "Parts a batch is computed in (1)"),
    Flag("use_chunked_training", bool, "Long sequences", "Learn sequences in chunks of tokens, in bounded memory"),
    Flag("chunk_size", str, "Long sequences", "Tokens of such a chunk, or auto: the largest that fits (2048)"),
    Flag("bptt_chunks", str, "Long sequences", "Chunks a recurrent model's gradients go back through, or all (1)"),
    Flag("cpu_offload", bool, "Long sequences", "Keep what chunks leave for others in host memory"),
    Flag("streamed", bool, "Streamed models", "Weights and optimizer in host memory: for models larger than the GPU"),
    Flag("gpu_budget_gib", float, "Streamed models", "GPU memory to use; what is left keeps layers there (nearly all)"),
    Flag("offload_activations", bool, "Streamed models", "Keep states between layers in host memory too"),
    Flag("tokenizer", str, "Data", f"{TOKENIZER_HELP} Without: the model's own, else one is trained on the data."),
    Flag("vocab_size", int, "Data", "Entries of a tokenizer trained here (4096)"),
    Flag("model", str, "Model", "tiny, small, act, counting; a folder, a config.json, or owner/name of the Hub (tiny)"),
    Flag("fresh_weights", bool, "Model", "Begin with random weights, though the model has some"),
    Flag("resize_embeddings", bool, "Model", "Add embeddings where the tokenizer has more tokens than the model"),
    Flag("attend_across_documents", bool, "Model", "Let documents that share a sequence see each other"),
    Flag("precision", str, "Model", "What the model computes in: auto, fp32 or bf16; weights are fp32 (auto)"),
    Flag("halt_max_steps", int, "Model", "For recurrent models; others take no notice (1)"),
    Flag("learning_rate", float, "Optimizer", "Step size, at its greatest (0.001)"),
    Flag("lr_schedule", str, "Optimizer", "constant, cosine or linear, by the run's steps (constant)"),
    Flag("warmup_steps", int, "Optimizer", "Steps over which the learning rate goes up (0)"),
    Flag("schedule_steps", int, "Optimizer", "The step at which it is lowest; else --steps"),
    Flag("weight_decay", float, "Optimizer", "Of matrices, not of norms and biases (0.1)"),
    Flag("max_grad_norm", float, "Optimizer", "Gradients are scaled down to this norm; 0: never (1.0)"),
    Flag("on_nan", str, "Optimizer", "A batch whose loss is not a number: stop, or skip it (stop)"),
    Flag("parallel_independent", bool, "Workers", "Several workers, merged at every commit"),
    Flag("ddp", bool, "Workers", "Ranks that learn every batch together: under torchrun, else --workers of them"),
    Flag("workers", int, "Workers", "How many workers or ranks; with --cuda-ids one a device (1)"),
    Flag("plan", str, "Workers", "claims or strided; without, strided with --ddp, else claims"),
    Flag("cuda_ids", str, "Workers", "CUDA devices, as in 0,1", also=("--devices",)),
    Flag("device", str, "Workers", "auto, cpu, cuda or cuda:N (auto)"),
    Flag("merge", str, "Workers", "mean, or sum of what each worker changed (mean)"),
    Flag("outer_learning_rate", float, "Workers", "How much of the workers' mean change is taken at a merge (1.0)"),
    Flag("outer_momentum", float, "Workers", "Nesterov momentum of that; 0 for none (0.0)"),
    Flag("respawn", int, "Workers", "How often workers that died are started again, in all (0)"),
    Flag("stall_timeout_s", float, "Workers", "How long one step may take before a worker is killed (3600.0)"),
    Flag("rank_timeout_s", float, "Workers", "How long ranks wait for one another (600.0)"),
    Flag("session_timeout_s", float, "Workers", "How long a silent worker keeps its chunks (60.0)"),
    Flag("steps", int, "Run", "Stop at this many steps of the run in all"),
    Flag("stop_after_epoch", bool, "Run", "Stop at the epoch's end, even with --iterate"),
    Flag("iterate", bool, "Run", "Go on into the next epoch"),
    Flag("seed", int, "Run", "Seed of the initial weights (0)"),
    Flag("commit_every_chunks", int, "Run", "Chunks between commits at most (8)"),
    Flag("commit_every_s", float, "Run", "Seconds between commits at most (300.0)"),
    Flag("keep_checkpoints", int, "Run", "Checkpoints that stay on disk (3)"),
    Flag("ledger", str, "Run", "postgresql://host/database?run=NAME; else ledger.sqlite in the run"),
    Flag("log_file", str, "Run", "Where metrics go; else metrics.jsonl in the run"),
    Flag("eval_file", str, "Evaluation", f"What to evaluate on, at the end and every so often: {_DATASET}"),
    Flag("eval_every", int, "Evaluation", "Evaluate at the first commit behind every so many steps; 0: at the end (0)"),
    Flag("eval_batches", int, "Evaluation", "How many batches of it; else all"),
)

NUMBER_OR_WORD = ("dataset_chunk_size", "chunk_size", "bptt_chunks")
"""Flags that take a number or one word, such as auto."""


def with_flags(command: Callable[..., None]) -> Callable[..., None]:
    """A command that takes every flag; those that were given come in as ``flags``."""

    @functools.wraps(command)
    def run(**given: Any) -> None:
        names = {flag.name for flag in FLAGS}
        flags = {name: value for name, value in given.items() if name in names and value is not None}
        command(**{name: value for name, value in given.items() if name not in names}, flags=flags)

    own = inspect.signature(command, eval_str=True).parameters
    kept = [parameter for name, parameter in own.items() if name != "flags"]
    whole = inspect.Signature([*kept, *(flag.parameter for flag in FLAGS)])
    run.__signature__ = whole  # pyright: ignore[reportAttributeAccessIssue] - what typer reads
    return run
