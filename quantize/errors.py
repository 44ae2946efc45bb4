"""What can go wrong between an HF folder and a quantised file that ships."""


class QuantizeError(Exception):
    """Base of this package's errors; each message names the culprit and what to do."""


class UnsupportedArchitectureError(QuantizeError, ValueError):
    """The converter does not know this model, or a feature its config turns on."""


class ModelConfigError(QuantizeError, ValueError):
    """config.json lacks a key the file needs, or contradicts the weights."""


class VocabularySizeError(QuantizeError, ValueError):
    """The tokenizer has tokens for which the embedding has no row (A17)."""


class UnsupportedTokenizerError(QuantizeError, ValueError):
    """llama.cpp has no pre-tokenizer that splits text as this tokenizer does."""


class Float16OverflowError(QuantizeError, OverflowError):
    """A weight is too large for float16."""


class AdapterMergeError(QuantizeError, ValueError):
    """The adapter does not fit the base model."""


class ConversionCheckError(QuantizeError, RuntimeError):
    """The written file does not behave as the model it was made from."""


class ImatrixError(QuantizeError, ValueError):
    """The importance matrix is missing, empty, or does not fit the model."""


class GenericTextError(QuantizeError, LookupError):
    """There is no generic text on this machine, or too little."""


class QuantisationError(QuantizeError, RuntimeError):
    """llama.cpp could not quantise; the message holds its log."""


class RepairError(QuantizeError, ValueError):
    """A mix of types that cannot be made."""


class FrontierError(QuantizeError, ValueError):
    """A wish that no file fulfils, or that cannot be understood."""


class ParityError(QuantizeError, ValueError):
    """Logits that cannot be compared."""


class ParityGateError(QuantizeError, RuntimeError):
    """The F16 file is not the model: nothing made from it could be trusted."""


class RolloutsError(QuantizeError, ValueError):
    """rollouts.jsonl cannot be read, or holds too little."""
