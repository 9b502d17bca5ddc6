"""What people call models, and which files they mean."""

from pathlib import Path

import pytest

from dragoman.errors import ModelFileError
from dragoman.hub.names import ModelName, RepoFile, choose_variant, list_variants, parse_name, quantization

MB = 1 << 20


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("hf:org/repo", ModelName("org/repo")),
        ("org/repo", ModelName("org/repo")),
        ("org/repo:q4_k_m", ModelName("org/repo", "q4_k_m")),
        ("hf:org/repo@v1:Q8_0", ModelName("org/repo", "Q8_0", "v1")),
        ("hf.co/org/repo:Q8_0", ModelName("org/repo", "Q8_0")),
        ("https://huggingface.co/org/repo", ModelName("org/repo")),
        ("https://huggingface.co/org/repo/tree/main", ModelName("org/repo")),
        ("https://huggingface.co/org/repo/blob/dev/a/b.gguf", ModelName("org/repo", "a/b.gguf", "dev")),
        ("hf:org/repo/b.gguf", ModelName("org/repo", "b.gguf")),
        ("ollama:llama3.2:1b", ModelName("llama3.2", "1b", kind="ollama")),
        ("ollama:me/mine", ModelName("me/mine", "latest", kind="ollama")),
        ("ollama:hf.co/org/repo:Q4_K_M", ModelName("hf.co/org/repo", "Q4_K_M", kind="ollama")),
        ("model.gguf", None),
        ("some/model.gguf", None),
        ("./org/repo", None),
        ("~/org/repo", None),
        ("/org/repo", None),
        ("three/parts/here", None),
        ("nothing", None),
    ],
)
def test_a_name_is_read(text: str, name: ModelName | None) -> None:
    assert parse_name(text) == name


def test_a_folder_that_is_there_is_no_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "org" / "repo").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert parse_name("org/repo") is None
    assert parse_name("hf:org/repo") is not None


@pytest.mark.parametrize(
    "text",
    ["hf:repo", "hf:../etc/passwd", "hf:a/../b", "hf:a/b/c", "hf:a b/c", "hf:", "ollama:../x", "hf:a/.."],
)
def test_what_is_no_name_is_told(text: str) -> None:
    with pytest.raises(ModelFileError, match="is not a valid model name"):
        parse_name(text)


@pytest.mark.parametrize(
    ("file", "label"),
    [
        ("Model-Q4_K_M.gguf", "Q4_K_M"),
        ("model.q8_0.gguf", "Q8_0"),
        ("a/Model-IQ2_XXS-00001-of-00003.gguf", "IQ2_XXS"),
        ("model-UD-Q4_K_XL.gguf", "UD-Q4_K_XL"),
        ("model-bf16.gguf", "BF16"),
        ("model-mxfp4.gguf", "MXFP4"),
        ("model.gguf", "model"),
    ],
)
def test_a_quantisation_is_read_off_a_file(file: str, label: str) -> None:
    assert quantization(file) == label


def files(**sizes: int) -> list[RepoFile]:
    return [RepoFile(name.replace("__", "."), size * MB, "0" * 64) for name, size in sizes.items()]


MANY = files(a_Q2_K__gguf=2, a_Q4_K_M__gguf=4, a_Q8_0__gguf=8, a_F16__gguf=16)
MANY = [RepoFile(file.name.replace("a_", "a-"), file.size, file.sha256) for file in MANY]


@pytest.mark.parametrize(("room", "label"), [(100, "Q8_0"), (8, "Q8_0"), (7, "Q4_K_M"), (2, "Q2_K")])
def test_the_best_that_fits_is_taken(room: int, label: str) -> None:
    assert choose_variant(list_variants(MANY), ModelName("o/r"), room * MB).label == label


def test_what_is_named_is_taken_whether_or_not_it_fits() -> None:
    for choice in ("f16", "F16", "a-F16.gguf"):
        assert choose_variant(list_variants(MANY), ModelName("o/r", choice), 0).label == "F16"


def test_nothing_fits() -> None:
    with pytest.raises(ModelFileError, match="the smallest, Q2_K"):
        choose_variant(list_variants(MANY), ModelName("o/r"), MB)


def test_what_is_not_there_is_told_with_what_is() -> None:
    with pytest.raises(ModelFileError, match="available: Q2_K, Q4_K_M, Q8_0, F16"):
        choose_variant(list_variants(MANY), ModelName("o/r", "Q5_0"), 0)


def test_parts_of_a_split_file_belong_together() -> None:
    parts = [RepoFile(f"m-Q4_0-0000{n}-of-00002.gguf", MB, "0" * 64) for n in (2, 1)]
    [variant] = list_variants(parts)
    assert (variant.label, variant.size, variant.first.name) == ("Q4_0", 2 * MB, parts[1].name)
    assert list_variants(parts[:1]) == []


def test_projectors_are_no_models_and_programs_are_not_taken() -> None:
    names = [
        "mmproj-F16.gguf",
        "model.safetensors",
        "config.json",
        "tokenizer.json",
        "modeling.py",
        "pytorch_model.bin",
    ]
    [variant] = list_variants([RepoFile(name, MB, "0" * 64) for name in names])
    assert (variant.label, [file.name for file in variant.files]) == ("safetensors", [*names[1:4]])


def test_parts_of_safetensors_belong_together() -> None:
    parts = [RepoFile(f"model-0000{n}-of-00002.safetensors", MB, "0" * 64) for n in (1, 2)]
    [variant] = list_variants(parts)
    assert (variant.label, variant.size) == ("safetensors", 2 * MB)
    assert list_variants(parts[:1]) == []


@pytest.mark.parametrize(
    ("names", "label"),
    [
        (["a-F16.gguf", "model.safetensors"], "F16"),
        (["openvino_model.xml", "openvino_model.bin", "model.safetensors"], "openvino"),
        (["openvino_model.xml", "model.safetensors"], "safetensors"),
    ],
)
def test_what_the_embedded_engine_runs_is_taken_before_safetensors(names: list[str], label: str) -> None:
    there = [RepoFile(name, MB, "0" * 64) for name in names]
    assert choose_variant(list_variants(there), ModelName("o/r"), 9 * MB).label == label


def test_weights_that_would_be_unpickled_are_none() -> None:
    there = [RepoFile("pytorch_model.bin", MB, "0" * 64), RepoFile("config.json", 1, "0" * 40)]
    assert list_variants(there) == []
    with pytest.raises(ModelFileError, match="only pickled weights"):
        choose_variant([], ModelName("o/r"), MB, there)


@pytest.mark.parametrize(
    ("names", "projectors"),
    [
        (["a-Q4_0.gguf", "a-Q8_0.gguf", "mmproj-F16.gguf"], ["mmproj-F16.gguf"] * 2),
        (["a-Q4_0.gguf", "mmproj-a-F32.gguf", "mmproj-a-Q8_0.gguf"], ["mmproj-a-Q8_0.gguf"]),
        (["a-Q4_0.gguf", "b-Q4_0.gguf", "mmproj-b-f16.gguf"], [None, "mmproj-b-f16.gguf"]),
        (["a-Q4_0.gguf", "b-Q4_0.gguf", "mmproj-F16.gguf"], [None, None]),
        (["llava-7b.Q4_K_M.gguf", "llava-7b-mmproj-f16.gguf"], ["llava-7b-mmproj-f16.gguf"]),
        (["q/a-Q4_0-00001-of-00001.gguf", "mmproj-BF16.gguf"], ["mmproj-BF16.gguf"]),
        (["a-Q4_0.gguf", "mmprojection-Q4_0.gguf"], [None, None]),
    ],
)
def test_a_projector_goes_with_the_model_that_it_is_of(
    names: list[str], projectors: list[str | None]
) -> None:
    variants = list_variants(RepoFile(name, MB, "0" * 64) for name in names)
    by_name = sorted(variants, key=lambda one: one.first.name)
    assert [one.projector.name if one.projector else None for one in by_name] == projectors
