"""Every key a user may set, read off the schema: type, range, default and docstring."""

import difflib
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt, MaxLen, MinLen
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from configs.schema import PipelineConfig

TAG = "type"
_PLAIN = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}


@dataclass(frozen=True)
class Key:
    """One key of the config."""

    dotted: str
    type: str
    """What may stand there, in words: `a whole number, at least 1`."""
    default: Any
    """JSON value; `REQUIRED` where there is none."""
    doc: str
    is_block: bool
    when: str = ""
    """`rl.credit.type=turn_gae` where the key belongs to one variant of a tagged union."""


REQUIRED = "(required)"


def block_variants(annotation: Any) -> dict[str, type[BaseModel]]:
    """The config classes an annotation admits, by tag; a plain block has its class name as tag."""
    found: dict[str, type[BaseModel]] = {}
    for option in _options(annotation):
        if isinstance(option, type) and issubclass(option, BaseModel):
            tag = option.model_fields.get(TAG)
            names = get_args(tag.annotation) if tag else (option.__name__,)
            found |= {str(name): option for name in names}
    return found


def is_tagged(annotation: Any) -> bool:
    """Whether a `type` key chooses among several variants."""
    return len(block_variants(annotation)) > 1


def mapping_value(annotation: Any) -> tuple[Any, Any] | None:
    """Key and value annotation where an annotation is a `dict`."""
    for option in _options(annotation):
        if get_origin(option) is dict:
            key, value = get_args(option)
            return key, value
    return None


def _options(annotation: Any) -> list[Any]:
    """The members of a union, aliases and `Annotated` opened up."""
    if get_origin(annotation) is Annotated:
        return _options(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        return [inner for option in get_args(annotation) for inner in _options(option)]
    return [annotation]


def type_text(annotation: Any, metadata: Sequence[Any] = ()) -> str:
    """What an annotation admits, in words."""
    options = _options(annotation)
    variants = block_variants(annotation)
    limits = [text for item in metadata if (text := _limit_text(item))]
    words = (
        ["a block whose type is one of " + ", ".join(variants)]
        if is_tagged(annotation)
        else [_option_text(option) for option in options if option is not type(None)]
    )
    text = ", ".join([" or ".join(dict.fromkeys(words)), *limits])
    return f"{text}, or null" if type(None) in options else text


def _option_text(option: Any) -> str:
    origin = get_origin(option)
    if option is type(None):
        return "null"
    if origin is Literal:
        return "one of " + ", ".join(str(choice) for choice in get_args(option))
    if origin is tuple:
        items = get_args(option)
        inner = _list_item_text(items[0])
        return f"a list of {inner}" if items[-1] is Ellipsis else f"a list of {len(items)} {inner}"
    if origin is dict:
        return "a block of keys, each " + type_text(get_args(option)[1])
    if isinstance(option, type) and issubclass(option, BaseModel):
        tag = option.model_fields.get(TAG)
        return f"a block of type {get_args(tag.annotation)[0]}" if tag else "a block of keys"
    return _PLAIN.get(option, str(option))


def _list_item_text(annotation: Any) -> str:
    plural = {int: "whole numbers", float: "numbers", str: "texts"}
    return plural.get(annotation) or f"items, each {type_text(annotation)}"


def _limit_text(item: Any) -> str:
    simple = {Ge: "at least {ge}", Gt: "above {gt}", Le: "at most {le}", Lt: "below {lt}"}
    for kind, text in simple.items():
        if isinstance(item, kind):
            return text.format(**{kind.__name__.lower(): getattr(item, kind.__name__.lower())})
    if isinstance(item, MinLen):
        return f"{item.min_length} or more"
    if isinstance(item, MaxLen):
        return f"{item.max_length} or fewer"
    pattern = getattr(item, "pattern", None)
    return f"matching {pattern}" if pattern else ""


def field_type(field: FieldInfo) -> str:
    """What a field admits, in words."""
    return type_text(field.annotation, field.metadata)


def json_value(value: Any) -> Any:
    """A default as it would stand in the JSON of a resolved config."""
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    if isinstance(value, tuple):
        return [json_value(item) for item in value]
    if isinstance(value, Mapping):
        return {str(name): json_value(item) for name, item in value.items()}
    return value


def json_default(field: FieldInfo) -> Any:
    """A field's own default as JSON; `REQUIRED` where there is none."""
    return json_value(_default(field, "", None))


def _doc(field: FieldInfo, variants: Mapping[str, type[BaseModel]]) -> str:
    own = field.description or ""
    if own or len(variants) != 1:
        return own
    return (next(iter(variants.values())).__doc__ or "").strip()


def _default(field: FieldInfo, name: str, owner: BaseModel | None) -> Any:
    if owner is not None:
        return getattr(owner, name)
    return REQUIRED if field.default is PydanticUndefined else field.default


def all_keys() -> list[Key]:
    """Every key of `PipelineConfig`, in the order of the schema, unions written out."""
    return list(_walk(PipelineConfig, "", PipelineConfig(), ""))


def _walk(model: type[BaseModel], prefix: str, owner: BaseModel | None, when: str) -> Iterator[Key]:
    for name, field in model.model_fields.items():
        dotted = f"{prefix}{name}"
        variants = block_variants(field.annotation)
        default = _default(field, name, owner)
        if name == TAG and when:
            continue
        yield Key(
            dotted,
            field_type(field),
            json_value(default),
            _doc(field, variants),
            bool(variants),
            when,
        )
        yield from _inside(dotted, field, default, variants, when)


def _inside(
    dotted: str,
    field: FieldInfo,
    default: Any,
    variants: Mapping[str, type[BaseModel]],
    when: str,
) -> Iterator[Key]:
    if is_tagged(field.annotation):
        tag = getattr(default, TAG, REQUIRED)
        yield Key(f"{dotted}.{TAG}", "one of " + ", ".join(variants), tag, "", False, when)
        for name, variant in variants.items():
            owner = default if isinstance(default, variant) else None
            both = f"{when}, {dotted}.{TAG}={name}" if when else f"{dotted}.{TAG}={name}"
            yield from _walk(variant, f"{dotted}.", owner, both)
    elif variants:
        variant = next(iter(variants.values()))
        yield from _walk(variant, f"{dotted}.", default, when)
    elif (pair := mapping_value(field.annotation)) and block_variants(pair[1]):
        for key, value in dict(default or {}).items():
            yield from _walk(type(value), f"{dotted}.{key}.", value, when)


def describe(path: str = "") -> list[Key]:
    """The keys at and under `path` (`""` is all of them).

    Raises:
        KeyError: there is no such key; the message suggests the nearest.
    """
    keys = all_keys()
    inside = [k for k in keys if not path or k.dotted == path or k.dotted.startswith(f"{path}.")]
    if not inside:
        near = nearest_keys(path, [key.dotted for key in keys])
        raise KeyError(f"no key {path!r}" + (f"; did you mean {near[0]}?" if near else ""))
    return inside


def nearest_keys(dotted: str, valid: Sequence[str]) -> list[str]:
    """Valid keys a person may have meant, best first: the same last name elsewhere, or a typo."""
    names = list(dict.fromkeys(valid))
    leaf = dotted.rsplit(".", 1)[-1]
    close = difflib.get_close_matches(dotted, names, n=3, cutoff=0.78)
    same_leaf = [name for name in names if name.rsplit(".", 1)[-1] == leaf]
    leaves = list(dict.fromkeys(name.rsplit(".", 1)[-1] for name in names))
    close_leaf = difflib.get_close_matches(leaf, leaves, n=1, cutoff=0.75)
    typo_leaf = [name for name in names if name.rsplit(".", 1)[-1] in close_leaf]

    def by_likeness(found: list[str]) -> list[str]:
        return sorted(found, key=lambda name: -difflib.SequenceMatcher(None, name, dotted).ratio())

    ranked = [*by_likeness(same_leaf), *close] if same_leaf else [*close, *by_likeness(typo_leaf)]
    return list(dict.fromkeys(ranked))[:3]
