"""Typed settings of every stage; imports neither torch nor Prefect."""

from configs.schema.pipeline import PipelineConfig

__all__ = ["PipelineConfig"]
