"""What all sections of a configuration are, and the fields that several of them have."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, PlainSerializer, PlainValidator

from hicache.config.units import format_duration, parse_duration

Duration = Annotated[float, PlainValidator(parse_duration), PlainSerializer(format_duration, return_type=str)]


class Section(BaseModel):
    """A mapping of the file: unknown keys and values of another type are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)
