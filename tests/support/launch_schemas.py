"""Check files of ``pipeloom launch`` for Kubernetes and SkyPilot against the schemas that these programs publish.

Run by ``make launch-schemas`` in an environment of its own, with the packages kubeflow-trainer-api and skypilot.
"""

import sys
from pathlib import Path
from typing import Any


def _kubeflow(document: dict[str, Any]) -> list[str]:
    """What the models of Kubeflow Trainer do not accept, or do not have."""
    from kubeflow_trainer_api import models

    model = getattr(models, f"TrainerV1alpha1{document['kind']}")
    return list(_unknown(document, model.from_dict(document).to_dict(), document["kind"]))


def _unknown(written: Any, understood: Any, where: str):
    """Places of values that a model did not take over, since it ignores what it does not have."""
    if isinstance(written, dict) and isinstance(understood, dict):
        for name, value in written.items():
            yield from _unknown(value, understood.get(name), f"{where}.{name}")
    elif isinstance(written, list) and isinstance(understood, list) and len(written) == len(understood):
        for number, value in enumerate(written):
            yield from _unknown(value, understood[number], f"{where}[{number}]")
    elif written != understood:
        yield f"{where}: written {written!r}, understood {understood!r}"


def _skypilot(document: dict[str, Any]) -> list[str]:
    import jsonschema
    from sky.utils import schemas

    found = []
    for schema, part in (
        (schemas.get_task_schema(), document),
        (schemas.get_resources_schema(), document["resources"]),
    ):
        found += [error.message for error in jsonschema.Draft7Validator(schema).iter_errors(part)]
    return found


def main(folders: list[str]) -> int:
    """Print what is wrong in the files of some folders; 1 if anything is."""
    import yaml

    found, num_documents = [], 0
    for folder in map(Path, folders):
        for name, check in (("kubeflow.yaml", _kubeflow), ("skypilot.yaml", _skypilot)):
            for document in yaml.safe_load_all((folder / name).read_text()):
                num_documents += 1
                found += [f"{folder.name}/{name}: {problem}" for problem in check(document)]
    print("\n".join(found) or f"{num_documents} documents are valid")  # noqa: T201
    return int(bool(found) or not num_documents)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
