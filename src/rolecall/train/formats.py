"""Which files may lie in a checkpoint: never a pickle, and safetensors only with a sane header. Nothing is executed."""

from pathlib import Path

from rolecall.policy.headers import FormatError, check_safetensors

_PICKLE_SUFFIXES = frozenset({".pt", ".pth", ".bin", ".pkl", ".pickle", ".ckpt", ".distcp", ".joblib", ".npz", ".zip"})
_PICKLE_STARTS = {
    b"PK\x03\x04": "a zip file, as torch.save writes",
    b"\x80\x02": "a pickle",
    b"\x80\x03": "a pickle",
    b"\x80\x04": "a pickle",
    b"\x80\x05": "a pickle",
}


def check_format(path: Path) -> None:
    """Raise `FormatError` if the file is, or may hide, a pickle, or is a safetensors file with a false header.

    Looks at the name and the first bytes; of a safetensors file the header is checked against the file's size (no
    overlap, no gap, shapes that fit their bytes) and no tensor is read.
    """
    if path.suffix.lower() in _PICKLE_SUFFIXES:
        raise FormatError(f"{path} looks like a pickle ({path.suffix}); only safetensors and JSON are read")
    if path.name == ".metadata":
        raise FormatError(f"{path} looks like a torch distributed checkpoint, which holds a pickle; it is not read")
    if path.suffix == ".safetensors":
        check_safetensors(path)
        return
    with path.open("rb") as file:
        start = file.read(4)
    for magic, kind in _PICKLE_STARTS.items():
        if start.startswith(magic):
            raise FormatError(f"{path} is {kind}; only safetensors and JSON are read")
