"""Whether another program can train a question's model on its cluster, before layouts are searched."""

from dataclasses import dataclass, field, replace

from pipeloom.config import RunConfig
from pipeloom.cost.hardware import Cluster
from pipeloom.errors import ConfigError
from pipeloom.planner.question import Question
from pipeloom.planner.run_file import named_model
from pipeloom.predict.places import node_problems
from pipeloom.workload.boundary import Boundary
from pipeloom.workload.dtypes import Precision, Products
from pipeloom.workload.launchers import Launcher, optimizer_problems, update_problems
from pipeloom.workload.model import ModelConfig, ModelShape, model_of
from pipeloom.workload.run import Attention
from pipeloom.workload.update import Update


@dataclass(frozen=True)
class Wanted:
    """What a program has to run, whatever the layout.

    Attributes:
        model: a name or a file; or its settings; or its sizes alone.
        seq: sequence length in tokens.
        precision: of weights and activations.
        products: of the operands of linear layers; ``None``: ``precision``.
        attention: the attention kernel.
        optimizer: name of the update rule.
        update: when weights are updated, and of which gradient the norm is limited.
        by_document: whether attention ends at the borders of documents.
        has_adapters: whether it trains low-rank adapters of frozen weights.
        boundary: the code of messages between stages; ``None``: they travel as they are.
    """

    model: str | ModelConfig | ModelShape
    seq: int
    precision: Precision
    products: Products | None = None
    attention: Attention = "flash2"
    optimizer: str = "adamw"
    update: Update = field(default_factory=Update)
    by_document: bool = False
    has_adapters: bool = False
    boundary: Boundary | None = None

    @classmethod
    def of(cls, question: Question, model: str | ModelShape) -> "Wanted":
        """What a question requires of the program, with the model as it was named."""
        return cls(
            model, question.seq, question.precision, question.products, question.attention, boundary=question.boundary
        )

    def by(self, config: RunConfig) -> "Wanted":
        """With the updates, the adapters and the attention of a run."""
        return replace(
            self,
            optimizer=config.optimizer.name,
            update=config.optimizer.known_update,
            has_adapters=config.adapter.rank is not None,
            by_document=config.data.by_document,
        )

    @property
    def config(self) -> ModelConfig:
        """The settings of the model."""
        if isinstance(self.model, str):
            return named_model(self.model, self.seq)
        return model_of(self.model, ModelConfig()) if isinstance(self.model, ModelShape) else self.model


def launch_problems(launcher: Launcher, wanted: Wanted, cluster: Cluster, num_devices: int) -> list[str]:
    """Why a program cannot train so on so many devices, a sentence each; the exports refuse for the same reasons."""
    narrow = launcher.product_problems(wanted.products)
    if launcher.is_own:
        return narrow
    title = launcher.title
    found = [
        *launcher.model_problems(wanted.config, wanted.precision, wanted.seq, by_document=wanted.by_document),
        *narrow,
        *optimizer_problems(title, wanted.optimizer),
        *update_problems(wanted.update),
        *node_problems(cluster, num_devices),
    ]
    if wanted.has_adapters:
        found.append(f"adapter.rank: the export to {title} is of runs that train all weights; leave it out")
    if wanted.boundary is not None:
        found.append(f"layout.boundary {wanted.boundary}: {title} sends tensors as they are; leave it out")
    if wanted.attention != "flash2" and not launcher.takes_attention:
        found.append(f"attention {wanted.attention}: {title} chooses its kernel itself; use flash2")
    return found


def check_launch(launcher: Launcher, wanted: Wanted, cluster: Cluster, num_devices: int) -> None:
    """Refuse what a program cannot train.

    Raises:
        ConfigError: has all of ``launch_problems``.
    """
    if problems := launch_problems(launcher, wanted, cluster, num_devices):
        raise ConfigError(problems, "the question")
