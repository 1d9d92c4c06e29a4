"""Recipes: whole jobs made of batches, as `tokenmill expand`, `distill` and `summarize` run them.

    expand       grow a dataset from examples
    distill      a teacher's answers with tokens and log probabilities
    summarize    a summary of every document that is new or has changed

The names in `__all__` are what other packages may use, such as the Dagster integration; they are imported on first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenmill.recipes.distill_prompts import DistillOptions as DistillOptions
    from tokenmill.recipes.distill_prompts import DistillPrompts as DistillPrompts
    from tokenmill.recipes.distill_prompts import checked_lines as check_prompts
    from tokenmill.recipes.distill_rows import Thinking as Thinking
    from tokenmill.recipes.distillation import distill as distill
    from tokenmill.recipes.documents import Reading as DocumentOptions
    from tokenmill.recipes.documents import gather as gather_documents
    from tokenmill.recipes.expand_lines import ExpandPrompts as ExpandPrompts
    from tokenmill.recipes.expand_lines import SamplingOptions as SamplingOptions
    from tokenmill.recipes.expand_order import ExpandRequest as ExpandRequest
    from tokenmill.recipes.expand_order import summary_document as expand_summary
    from tokenmill.recipes.expand_prompts import JUDGE as JUDGE
    from tokenmill.recipes.expand_prompts import known_ways as expand_methods
    from tokenmill.recipes.expand_prompts import load as load_prompt
    from tokenmill.recipes.expand_schema import read_schema as read_schema
    from tokenmill.recipes.expand_schema import wrong as schema_error
    from tokenmill.recipes.expand_seeds import read_seeds as read_seeds
    from tokenmill.recipes.expand_transforms import INSTRUCTION as INSTRUCTION
    from tokenmill.recipes.expand_transforms import variants as variants
    from tokenmill.recipes.expansion import expand as expand
    from tokenmill.recipes.manifest import read_manifest as read_manifest
    from tokenmill.recipes.near import Near as NearDuplicates
    from tokenmill.recipes.rows import read_rows as read_rows
    from tokenmill.recipes.rows import suffix_of as file_suffix
    from tokenmill.recipes.rows import write_rows as write_rows
    from tokenmill.recipes.runner import Answered as Answered
    from tokenmill.recipes.runner import Budget as Budget
    from tokenmill.recipes.runner import End as End
    from tokenmill.recipes.runner import Line as Line
    from tokenmill.recipes.runner import Origin as Origin
    from tokenmill.recipes.runner import Spent as Spent
    from tokenmill.recipes.runner import chat_line as chat_line
    from tokenmill.recipes.runner import text_of as text_of
    from tokenmill.recipes.summarization import SummarizeRequest as SummarizeRequest
    from tokenmill.recipes.summarization import summarize as summarize
    from tokenmill.recipes.summarize_prompts import prompts_for as summary_prompts

_MODULES = {
    "Answered": ("runner", "Answered"),
    "Budget": ("runner", "Budget"),
    "DistillOptions": ("distill_prompts", "DistillOptions"),
    "DistillPrompts": ("distill_prompts", "DistillPrompts"),
    "DocumentOptions": ("documents", "Reading"),
    "End": ("runner", "End"),
    "ExpandPrompts": ("expand_lines", "ExpandPrompts"),
    "ExpandRequest": ("expand_order", "ExpandRequest"),
    "INSTRUCTION": ("expand_transforms", "INSTRUCTION"),
    "JUDGE": ("expand_prompts", "JUDGE"),
    "Line": ("runner", "Line"),
    "NearDuplicates": ("near", "Near"),
    "Origin": ("runner", "Origin"),
    "SamplingOptions": ("expand_lines", "SamplingOptions"),
    "Spent": ("runner", "Spent"),
    "SummarizeRequest": ("summarization", "SummarizeRequest"),
    "Thinking": ("distill_rows", "Thinking"),
    "chat_line": ("runner", "chat_line"),
    "check_prompts": ("distill_prompts", "checked_lines"),
    "distill": ("distillation", "distill"),
    "expand": ("expansion", "expand"),
    "expand_methods": ("expand_prompts", "known_ways"),
    "expand_summary": ("expand_order", "summary_document"),
    "file_suffix": ("rows", "suffix_of"),
    "gather_documents": ("documents", "gather"),
    "load_prompt": ("expand_prompts", "load"),
    "read_manifest": ("manifest", "read_manifest"),
    "read_rows": ("rows", "read_rows"),
    "read_schema": ("expand_schema", "read_schema"),
    "read_seeds": ("expand_seeds", "read_seeds"),
    "schema_error": ("expand_schema", "wrong"),
    "summarize": ("summarization", "summarize"),
    "summary_prompts": ("summarize_prompts", "prompts_for"),
    "text_of": ("runner", "text_of"),
    "variants": ("expand_transforms", "variants"),
    "write_rows": ("rows", "write_rows"),
}

__all__ = [
    "INSTRUCTION",
    "JUDGE",
    "Answered",
    "Budget",
    "DistillOptions",
    "DistillPrompts",
    "DocumentOptions",
    "End",
    "ExpandPrompts",
    "ExpandRequest",
    "Line",
    "NearDuplicates",
    "Origin",
    "SamplingOptions",
    "Spent",
    "SummarizeRequest",
    "Thinking",
    "chat_line",
    "check_prompts",
    "distill",
    "expand",
    "expand_methods",
    "expand_summary",
    "file_suffix",
    "gather_documents",
    "load_prompt",
    "read_manifest",
    "read_rows",
    "read_schema",
    "read_seeds",
    "schema_error",
    "summarize",
    "summary_prompts",
    "text_of",
    "variants",
    "write_rows",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'tokenmill.recipes' has no attribute {name!r}")
    module, attribute = _MODULES[name]
    value = getattr(import_module(f"tokenmill.recipes.{module}"), attribute)
    globals()[name] = value
    return value
