"""Base of every spec model: closed, frozen, strictly typed; the docstring under a field is its documentation."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field
from pydantic_core import CoreSchema, core_schema


class SpecModel(BaseModel):
    """Unknown keys are refused; 4096.0, "4096" and true are no whole numbers."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True)


class OneOf:
    """Annotation of a string out of a table of facts: checked and documented as a `Literal` of its names would be."""

    def __init__(self, names: Iterable[str]) -> None:
        self.names = list(names)

    def __get_pydantic_core_schema__(self, _source: Any, _handler: Any) -> CoreSchema:
        return core_schema.literal_schema(self.names)


PositiveInt = Annotated[int, Field(ge=1)]
MAX_FP32 = 3.4028234663852886e38  # the kernels compute in fp32
FiniteFloat = Annotated[float, Field(allow_inf_nan=False, ge=-MAX_FP32, le=MAX_FP32)]
