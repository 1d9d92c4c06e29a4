"""Recipes: workflows of batches behind `tokenmill expand`, `distill` and `summarize`.

    expand       grow a dataset from examples
    distill      a teacher's answers with tokens and log probabilities
    summarize    a summary of every document that is new or has changed

`__all__` is the interface for other packages, such as the Dagster integration; its names are imported on first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenmill.recipes.distillation.prompts import DistillOptions as DistillOptions
    from tokenmill.recipes.distillation.prompts import DistillPrompts as DistillPrompts
    from tokenmill.recipes.distillation.prompts import check_prompts as check_prompts
    from tokenmill.recipes.distillation.recipe import distill as distill
    from tokenmill.recipes.distillation.rows import Thinking as Thinking
    from tokenmill.recipes.expansion.lines import ExpandPrompts as ExpandPrompts
    from tokenmill.recipes.expansion.lines import SamplingOptions as SamplingOptions
    from tokenmill.recipes.expansion.near_duplicates import NearDuplicates as NearDuplicates
    from tokenmill.recipes.expansion.prompts import JUDGE as JUDGE
    from tokenmill.recipes.expansion.prompts import expand_methods as expand_methods
    from tokenmill.recipes.expansion.prompts import load_prompt as load_prompt
    from tokenmill.recipes.expansion.recipe import expand as expand
    from tokenmill.recipes.expansion.request import ExpandRequest as ExpandRequest
    from tokenmill.recipes.expansion.request import expand_summary as expand_summary
    from tokenmill.recipes.expansion.schema import read_schema as read_schema
    from tokenmill.recipes.expansion.schema import schema_error as schema_error
    from tokenmill.recipes.expansion.seeds import read_seeds as read_seeds
    from tokenmill.recipes.expansion.transforms import INSTRUCTION as INSTRUCTION
    from tokenmill.recipes.expansion.transforms import variants as variants
    from tokenmill.recipes.runner import Answered as Answered
    from tokenmill.recipes.runner import AnswerOrigin as Origin
    from tokenmill.recipes.runner import Budget as Budget
    from tokenmill.recipes.runner import Line as Line
    from tokenmill.recipes.runner import RecipeCost as Spent
    from tokenmill.recipes.runner import RecipeEnd as End
    from tokenmill.recipes.runner import chat_line as chat_line
    from tokenmill.recipes.runner import text_of as text_of
    from tokenmill.recipes.summarization.documents import DocumentOptions as DocumentOptions
    from tokenmill.recipes.summarization.documents import gather_documents as gather_documents
    from tokenmill.recipes.summarization.manifest import read_manifest as read_manifest
    from tokenmill.recipes.summarization.prompts import summary_prompts as summary_prompts
    from tokenmill.recipes.summarization.recipe import SummarizeRequest as SummarizeRequest
    from tokenmill.recipes.summarization.recipe import summarize as summarize
    from tokenmill.storage.rows import read_rows as read_rows
    from tokenmill.storage.rows import suffix_of as file_suffix
    from tokenmill.storage.rows import write_rows as write_rows

_MODULES = {
    "Answered": ("runner", "Answered"),
    "Budget": ("runner", "Budget"),
    "DistillOptions": ("distillation.prompts", "DistillOptions"),
    "DistillPrompts": ("distillation.prompts", "DistillPrompts"),
    "DocumentOptions": ("summarization.documents", "DocumentOptions"),
    "End": ("runner", "RecipeEnd"),
    "ExpandPrompts": ("expansion.lines", "ExpandPrompts"),
    "ExpandRequest": ("expansion.request", "ExpandRequest"),
    "INSTRUCTION": ("expansion.transforms", "INSTRUCTION"),
    "JUDGE": ("expansion.prompts", "JUDGE"),
    "Line": ("runner", "Line"),
    "NearDuplicates": ("expansion.near_duplicates", "NearDuplicates"),
    "Origin": ("runner", "AnswerOrigin"),
    "SamplingOptions": ("expansion.lines", "SamplingOptions"),
    "Spent": ("runner", "RecipeCost"),
    "SummarizeRequest": ("summarization.recipe", "SummarizeRequest"),
    "Thinking": ("distillation.rows", "Thinking"),
    "chat_line": ("runner", "chat_line"),
    "check_prompts": ("distillation.prompts", "check_prompts"),
    "distill": ("distillation.recipe", "distill"),
    "expand": ("expansion.recipe", "expand"),
    "expand_methods": ("expansion.prompts", "expand_methods"),
    "expand_summary": ("expansion.request", "expand_summary"),
    "file_suffix": (".storage.rows", "suffix_of"),
    "gather_documents": ("summarization.documents", "gather_documents"),
    "load_prompt": ("expansion.prompts", "load_prompt"),
    "read_manifest": ("summarization.manifest", "read_manifest"),
    "read_rows": (".storage.rows", "read_rows"),
    "read_schema": ("expansion.schema", "read_schema"),
    "read_seeds": ("expansion.seeds", "read_seeds"),
    "schema_error": ("expansion.schema", "schema_error"),
    "summarize": ("summarization.recipe", "summarize"),
    "summary_prompts": ("summarization.prompts", "summary_prompts"),
    "text_of": ("runner", "text_of"),
    "variants": ("expansion.transforms", "variants"),
    "write_rows": (".storage.rows", "write_rows"),
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
    value = getattr(import_module(f".{module}", __name__), attribute)
    globals()[name] = value
    return value
