"""What is wrong with a data set."""

from pathlib import Path


class DatasetError(ValueError):
    """A data set that cannot be read as it claims to be: the file, what is wrong with it, what to try."""

    def __init__(self, path: Path, problem: str, advice: str) -> None:
        super().__init__(path, problem, advice)
        self.path = path

    def __str__(self) -> str:
        path, problem, advice = self.args
        return f"{path}: {problem}. {advice}"
