"""The one content hash, atomic writes, and the record that stages pass to each other."""

from tasks.artifacts.atomic import write_atomic, write_json, write_jsonl
from tasks.artifacts.content_hash import hash_bytes, hash_file, hash_json, hash_tensors, hash_tree
from tasks.artifacts.record import ArtifactRecord

__all__ = [
    "ArtifactRecord",
    "hash_bytes",
    "hash_file",
    "hash_json",
    "hash_tensors",
    "hash_tree",
    "write_atomic",
    "write_json",
    "write_jsonl",
]
