"""All models of the zoo by name, each in two sizes, and trainings from a user's own script.

    training("resnet50", "tiny")            # a Training, weights and data from the seed
    job("resnet50") / job("train.py")       # a function that makes a new Training

`tiny` steps take 20 to 170 ms on one core and fit any machine; `full` is the published configuration.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from inspect import Parameter, signature
from pathlib import Path

from foretrace.errors import ForetraceError, MissingExtraError
from foretrace.names import question, resolve
from foretrace.reading import address
from foretrace.training.training import Training

SIZES = ("tiny", "full")
_ASKED = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)


@dataclass(frozen=True, slots=True, kw_only=True)
class ZooModel:
    """One model of the zoo. `home` is the module with `make(size) -> Training`, loaded when it is used."""

    name: str
    task: str  # "image classification"
    summary: str  # one line: architecture and what the two sizes are
    source: str  # paper
    home: str  # "foretrace.zoo.vision:resnet50"
    parameters: tuple[int, int]  # of tiny and of full
    needs: str = ""  # a package beside torch


_ZOO = "foretrace.zoo"
ENTRIES: tuple[ZooModel, ...] = (
    ZooModel(
        name="resnet50",
        task="image classification",
        summary="ResNet-50: 53 convolutions with batch norm; tiny a quarter of the width on 64 x 64 pixels",
        source="He et al., Deep Residual Learning for Image Recognition, CVPR 2016",
        home=f"{_ZOO}.vision:resnet50",
        parameters=(1_532_276, 25_557_032),
    ),
    ZooModel(
        name="inception-v3",
        task="image classification",
        summary="Inception v3: 94 convolutions in parallel branches; tiny a quarter of the width on 107 x 107 pixels",
        source="Szegedy et al., Rethinking the Inception Architecture for Computer Vision, CVPR 2016",
        home=f"{_ZOO}.inception:inception_v3",
        parameters=(1_423_276, 27_161_264),
    ),
    ZooModel(
        name="mobilenet-v2",
        task="image classification",
        summary="MobileNetV2: depthwise convolutions, many small operators; tiny width 0.35 on 64 x 64 pixels",
        source="Sandler et al., MobileNetV2: Inverted Residuals and Linear Bottlenecks, CVPR 2018",
        home=f"{_ZOO}.vision:mobilenet_v2",
        parameters=(346_180, 3_504_872),
    ),
    ZooModel(
        name="vgg11",
        task="image classification",
        summary="VGG-11: convolutions without normalisation, large linear layers; tiny half the width on 32 x 32",
        source="Simonyan and Zisserman, Very Deep Convolutional Networks, ICLR 2015, configuration A",
        home=f"{_ZOO}.vision:vgg11",
        parameters=(3_721_508, 132_863_336),
    ),
    ZooModel(
        name="bert",
        task="language model",
        summary="BERT base, masked words and next sentence; tiny 3 layers of 128, 64 words",
        source="Devlin et al., BERT: Pre-training of Deep Bidirectional Transformers, NAACL 2019",
        home=f"{_ZOO}.language:bert",
        parameters=(901_250, 110_106_428),
        needs="transformers",
    ),
    ZooModel(
        name="gpt2",
        task="language model",
        summary="GPT-2 of 124 million parameters; tiny 4 layers of 128, 64 words",
        source="Radford et al., Language Models are Unsupervised Multitask Learners, 2019",
        home=f"{_ZOO}.language:gpt2",
        parameters=(1_063_680, 124_439_808),
        needs="transformers",
    ),
    ZooModel(
        name="llama",
        task="language model",
        summary="Llama decoder with grouped-query attention in the size of TinyLlama; tiny 4 layers of 160, 64 words",
        source="Touvron et al., LLaMA, 2023; Zhang et al., TinyLlama, 2024",
        home=f"{_ZOO}.language:llama",
        parameters=(1_793_440, 1_100_048_384),
        needs="transformers",
    ),
    ZooModel(
        name="lstm-lm",
        task="language model",
        summary="word language model, 2 LSTM layers of 1500 with dropout; tiny 2 of 256, 20 steps",
        source="Zaremba et al., Recurrent Neural Network Regularization, 2014",
        home=f"{_ZOO}.lstm_lm:lstm_lm",
        parameters=(2_078_672, 66_034_000),
    ),
    ZooModel(
        name="dropout-lstm",
        task="language model",
        summary="word language model with recurrent dropout, 2 LSTM layers of 650; tiny 2 of 512, 20 steps",
        source="Zaremba et al. 2014, medium; Gal and Ghahramani, NeurIPS 2016; Sarma et al., NeurIPS 2021",
        home=f"{_ZOO}.dropout_lstm:dropout_lstm",
        parameters=(6_252_496, 19_780_400),
    ),
    ZooModel(
        name="dropout-lstm-large",
        task="language model",
        summary="word language model with recurrent dropout, 2 LSTM layers of 1500; tiny 1 of 1024, 12 steps",
        source="Zaremba et al. 2014, large; Gal and Ghahramani, NeurIPS 2016; Sarma et al., NeurIPS 2021",
        home=f"{_ZOO}.dropout_lstm:dropout_lstm_large",
        parameters=(10_445_800, 66_034_000),
    ),
    ZooModel(
        name="acoustic-lstm",
        task="speech recognition",
        summary="acoustic model with recurrent dropout, 3 LSTM layers of 1024 on frames; tiny 2 of 512, 24 frames",
        source="Sak et al., Long Short-Term Memory Architectures for Acoustic Modeling, Interspeech 2014",
        home=f"{_ZOO}.dropout_lstm:acoustic_lstm",
        parameters=(3_584_200, 24_356_816),
    ),
    ZooModel(
        name="seq2seq",
        task="translation",
        summary="LSTM encoder and decoder with attention, 4 layers of 1000; tiny 2 of 192, 16 words",
        source="Luong et al., Effective Approaches to Attention-based Neural Machine Translation, EMNLP 2015",
        home=f"{_ZOO}.translation:seq2seq",
        parameters=(2_376_656, 215_114_000),
    ),
    ZooModel(
        name="transformer",
        task="translation",
        summary="Transformer base, 6 + 6 layers of 512; tiny 2 + 2 of 128, 24 words",
        source="Vaswani et al., Attention Is All You Need, NeurIPS 2017",
        home=f"{_ZOO}.translation:transformer",
        parameters=(1_181_696, 63_082_496),
    ),
    ZooModel(
        name="detector",
        task="object detection",
        summary="Faster R-CNN: ResNet-50, feature pyramid, proposals, RoIAlign; tiny a shallow one on 96 x 96 pixels",
        source="Ren et al., Faster R-CNN, NeurIPS 2015; Lin et al., Feature Pyramid Networks, CVPR 2017",
        home=f"{_ZOO}.detection:detector",
        parameters=(293_092, 41_808_406),
    ),
    ZooModel(
        name="deepspeech2",
        task="speech recognition",
        summary="Deep Speech 2: convolutions, 5 bidirectional GRU layers of 800, CTC; tiny 2 layers of 96",
        source="Amodei et al., Deep Speech 2, ICML 2016",
        home=f"{_ZOO}.speech:deepspeech2",
        parameters=(379_397, 41_190_557),
    ),
    ZooModel(
        name="gan",
        task="image generation",
        summary="DCGAN on 64 x 64 pixels: two networks, two optimizers; tiny half the width on 32 x 32 pixels",
        source="Radford et al., Unsupervised Representation Learning with DCGANs, ICLR 2016",
        home=f"{_ZOO}.gan:dcgan",
        parameters=(538_432, 6_342_272),
    ),
    ZooModel(
        name="actor-critic",
        task="reinforcement learning",
        summary="actor-critic on drawn cart-poles, many small operators; tiny 36 x 36 pixels, 16 ticks a step",
        source="Mnih et al., Asynchronous Methods for Deep Reinforcement Learning, ICML 2016",
        home=f"{_ZOO}.reinforcement:actor_critic",
        parameters=(13_595, 676_915),
    ),
    ZooModel(
        name="dlrm",
        task="recommendation",
        summary="DLRM with the tables of Criteo Kaggle, 540 million parameters; tiny at most 80,000 rows a table",
        source="Naumov et al., Deep Learning Recommendation Model, 2019",
        home=f"{_ZOO}.recommendation:dlrm",
        parameters=(11_146_673, 540_677_217),
    ),
    ZooModel(
        name="ncf",
        task="recommendation",
        summary="NeuMF in the size of MovieLens-20M, bound by its optimizer; tiny a quarter of the factors",
        source="He et al., Neural Collaborative Filtering, WWW 2017",
        home=f"{_ZOO}.recommendation:ncf",
        parameters=(4_614_801, 31_832_577),
    ),
    ZooModel(
        name="gnn",
        task="graph classification",
        summary="graph isomorphism network, 5 layers of 64 on graphs of 512 nodes; tiny graphs of 96 nodes",
        source="Xu et al., How Powerful are Graph Neural Networks?, ICLR 2019",
        home=f"{_ZOO}.graphs:gnn",
        parameters=(41_523, 44_835),
    ),
)


def entries() -> dict[str, ZooModel]:
    """Every model by name."""
    return {each.name: each for each in ENTRIES}


def entry(name: str) -> ZooModel:
    """The model of this name. Raises ForetraceError naming the nearest ones."""
    known = entries()
    found = resolve(name, known)
    if found is None:
        if said := address(name):
            raise ForetraceError(f"{said}.")
        if Path(name).suffix or len(Path(name).parts) > 1:
            raise ForetraceError(f"{name} is neither a Python script nor a model of foretrace zoo; give one of them.")
        raise ForetraceError(f"the zoo has no model {name!r}; {question(name, known)}")
    return known[found]


def training(name: str, size: str = "tiny", *, seed: int = 0) -> Training:
    """A model of the zoo as a Training. Raises ForetraceError for an unknown name or size, MissingExtraError."""
    found = entry(name)
    size = resolve(size, SIZES) or size
    if size not in SIZES:
        raise ForetraceError(f"there is no size {size!r}; choose tiny or full.")
    module, _, function = found.home.partition(":")
    try:
        import torch

        make = getattr(importlib.import_module(module), function)
        torch.manual_seed(seed)
        made: Training = make(size)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        extra = "torch" if package == "torch" else "zoo"
        raise MissingExtraError(
            f'{name} needs {package}, which is not installed: pip install "foretrace[{extra}]"'
        ) from error
    return made


def job(model: str, size: str = "tiny", *, seed: int = 0) -> Callable[[], Training]:
    """A function that makes the same training every time: a model of the zoo, or `training()` of a script.

    Raises ForetraceError where there is no such model or the script has no such function.
    """
    path = Path(model)
    if path.suffix != ".py":
        entry(model)
        return lambda: training(model, size, seed=seed)
    if not path.is_file():
        raise ForetraceError(f"{model} does not exist; give a script with a function training(), or a zoo model.")
    return lambda: _from_script(path, seed)


@contextmanager
def script_mistakes(source: str | Path) -> Iterator[None]:
    """What the code of a script raises becomes a ForetraceError that names its line; what is raised elsewhere stays.

    What it prints goes to standard error: standard output is for answers.
    """
    try:
        with redirect_stdout(sys.stderr):
            yield
    except ForetraceError:
        raise
    except Exception as error:
        mistake = _mistake(Path(source), error)
        if mistake is None:
            raise
        raise mistake from error


def _mistake(path: Path, error: BaseException) -> ForetraceError | None:
    """The last line of the script that led to the error; None where the script is not to blame."""
    lines = [each.lineno for each in traceback.extract_tb(error.__traceback__) if _same(each.filename, path)]
    if isinstance(error, SyntaxError) and _same(error.filename or "", path):
        lines.append(error.lineno)
    if not lines:
        return None
    if isinstance(error, SystemExit):
        return ForetraceError(f"{path} ends itself in line {lines[-1]}; keep that under if __name__ == '__main__'.")
    said = (getattr(error, "msg", None) or str(error)).strip().splitlines()
    what = f"{type(error).__name__}{': ' if said else ''}{said[0].rstrip('.') if said else ''}"
    return ForetraceError(
        f"{path} line {lines[-1]} raises {what}; see that training() and a step of it run by themselves."
    )


def _same(name: str, path: Path) -> bool:
    return name.endswith(path.suffix) and Path(name).resolve() == path.resolve()


def _from_script(path: Path, seed: int) -> Training:
    import torch

    spec = importlib.util.spec_from_file_location(f"_foretrace_job_{path.stem}", path)
    assert spec is not None and spec.loader is not None  # the suffix is .py
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.parent))
    try:
        torch.manual_seed(seed)
        with redirect_stdout(sys.stderr):  # standard output is for answers
            spec.loader.exec_module(module)
        make = getattr(module, "training", None)
        if not callable(make):
            raise ForetraceError(f"{path} has no function training(); let it return a foretrace.Training.")
        if any(each.default is each.empty and each.kind in _ASKED for each in signature(make).parameters.values()):
            raise ForetraceError(f"training() of {path} needs arguments; give each a default value.")
        with redirect_stdout(sys.stderr):
            made = make()
    except RuntimeError:  # of tensors without data, too; whoever made them knows another way
        raise
    except (Exception, SystemExit) as error:
        raise (_mistake(path, error) or error) from error
    finally:
        sys.path.remove(str(path.parent))
    if not isinstance(made, Training):
        raise ForetraceError(
            f"training() of {path} returned {type(made).__name__}; let it return a foretrace.Training."
        )
    return made
