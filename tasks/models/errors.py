"""Errors of loading, adapting and saving models."""


class ModelError(Exception):
    """Base of what can go wrong with a model."""


class UnknownArchitectureError(ModelError, ValueError):
    """The model's architecture is not one this pipeline trains and converts."""


class DamagedModelError(ModelError, ValueError):
    """A model's folder is not whole, or its files are not of one model."""


class VocabularyError(ModelError, ValueError):
    """Tokenizer and embedding do not fit each other."""


class WeightsMismatchError(ModelError, ValueError):
    """Weights have another shape, name or hash than announced."""


class NonFiniteStepError(ModelError, ArithmeticError):
    """Too many optimiser steps in a row had a non-finite gradient or loss."""


class NonFiniteWeightError(ModelError, ArithmeticError):
    """A weight is NaN or infinite."""


class BatchLayoutError(ModelError, ValueError):
    """Real tokens do not stand on the left of their rows, or what is no prediction is scored."""


class UnpackableModelError(ModelError, ValueError):
    """A model's attention cannot keep packed sequences apart."""
