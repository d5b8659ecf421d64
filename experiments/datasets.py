"""The error of a damaged or incomplete data set."""

from pathlib import Path


class DatasetError(ValueError):
    """A data set is not what it claims to be; names the file, the problem and what to try."""

    def __init__(self, path: Path, problem: str, advice: str) -> None:
        super().__init__(path, problem, advice)
        self.path = path

    def __str__(self) -> str:
        path, problem, advice = self.args
        return f"{path}: {problem}. {advice}"
