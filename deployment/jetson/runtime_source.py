"""The source that a device builds its llama-server from: named with its hash, brought by hand."""

from deployment.jetson.errors import MissingInputError

# version of llama-cpp-python → sha256 and bytes of its source package, as its registry publishes it
SOURCES = {
    "0.3.36": ("832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e", 76_589_250),
}
PREFIX = "/opt/rl-pipeline-runtime"


def source_of(version: str) -> dict[str, str | int]:
    """`file`, `sha256`, `size` and the place on the device of a version's source package.

    The bundle does not carry it (73 MiB, the same for every bundle); the device's build script
    takes it only with this hash.

    Raises:
        MissingInputError: a version whose hash is not known here.
    """
    if version not in SOURCES:
        raise MissingInputError(
            f"llama-cpp-python {version} is installed, and the sha256 of its source package is not "
            f"in {__name__} (known: {', '.join(SOURCES)}); add it there"
        )
    sha256, size = SOURCES[version]
    file = f"llama_cpp_python-{version}.tar.gz"
    return {"file": file, "sha256": sha256, "size": size, "place": f"{PREFIX}/src/{file}"}
