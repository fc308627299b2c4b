import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from grove_adapters.errors import InputError, InputTypeError, UnreadableError
from grove_adapters.extract import Caption, Record, Records
from grove_adapters.extract.records import assign_splits, read_image

PICTURE = Image.new("RGB", (4, 4), "red")


def test_captions_get_ids_and_keep_what_they_have():
    record = Record("cat", PICTURE, ["a cat, sitting", Caption("a tabby", "t7", {"level": 2})])
    assert [caption.id for caption in record.captions] == ["cat#0", "t7"]
    assert record.captions[0].text == "a cat, sitting"
    assert record.captions[1].columns == {"level": 2}


@pytest.mark.parametrize("caption", [5, None, ["a"], float("nan")])
def test_a_caption_that_is_not_text_is_refused_by_name(caption):
    with pytest.raises(InputTypeError, match=r"'cat#1' of image 'cat': expected text"):
        Record("cat", PICTURE, ["fine", caption])


def test_blank_and_bare_captions_are_refused():
    with pytest.raises(InputError, match=r"'cat#0' of image 'cat'.*blank"):
        Record("cat", PICTURE, [" \n"])
    with pytest.raises(InputTypeError, match=r"write \[caption\]"):
        Record("cat", PICTURE, "a cat")


def test_records_refuse_emptiness_duplicates_and_positives_out_of_range():
    one = Record("a", PICTURE, ["x"])
    with pytest.raises(InputError, match="got none"):
        Records([])
    with pytest.raises(InputError, match=r"image ids.*'a' 2 times"):
        Records([one, one])
    with pytest.raises(InputError, match=r"caption ids.*'c' 2 times"):
        Records([Record("a", PICTURE, [Caption("x", "c")]), Record("b", PICTURE, [Caption("y", "c")])])
    with pytest.raises(InputError, match="caption column of positives"):
        Records([one], positives=[[0, 1]])
    with pytest.raises(InputError, match=r"shape \(R, 2\)"):
        Records([one], positives=[0, 1])


def test_links_join_every_image_with_its_own_captions():
    records = Records([Record("a", PICTURE, ["1", "2"]), Record("b", PICTURE), Record("c", PICTURE, ["3"])])
    assert records.links.tolist() == [[0, 0], [0, 1], [2, 2]]
    assert [caption.text for caption in records.captions] == ["1", "2", "3"]
    assert repr(records) == "Records(3 images, 3 captions)"


@pytest.mark.parametrize(
    "changed",
    [
        Record("b", PICTURE, ["x"], "test", 1, {"k": 2}),
        Record("a", Image.new("RGB", (4, 4), "blue"), ["x"], "test", 1, {"k": 2}),
        Record("a", PICTURE, ["y"], "test", 1, {"k": 2}),
        Record("a", PICTURE, [Caption("x", "z")], "test", 1, {"k": 2}),
        Record("a", PICTURE, ["x"], "train", 1, {"k": 2}),
        Record("a", PICTURE, ["x"], "test", 2, {"k": 2}),
        Record("a", PICTURE, ["x"], "test", 1, {"k": 3}),
        Record("a", PICTURE, [Caption("x", columns={"k": 1})], "test", 1, {"k": 2}),
    ],
)
def test_the_fingerprint_notices_every_change(changed):
    record = Record("a", PICTURE, ["x"], "test", 1, {"k": 2})
    assert (
        Records([record]).fingerprint == Records([Record("a", PICTURE.copy(), ["x"], "test", 1, {"k": 2})]).fingerprint
    )
    assert Records([record]).fingerprint != Records([changed]).fingerprint
    assert Records([record]).fingerprint != Records([record], positives=[[0, 0]]).fingerprint


def test_the_fingerprint_survives_a_moved_folder_and_notices_a_changed_file(photographs, tmp_path):
    before = Records([Record("a", photographs / "a.jpg", ["x"])]).fingerprint
    moved = photographs.rename(tmp_path / "elsewhere")
    assert Records([Record("a", moved / "a.jpg", ["x"])]).fingerprint == before
    (moved / "a.jpg").write_bytes((moved / "a.jpg").read_bytes() + b"\0")
    assert Records([Record("a", moved / "a.jpg", ["x"])]).fingerprint != before


class Drawn:
    def __init__(self, key):
        self.key = key

    def __call__(self):
        return PICTURE


def test_pictures_open_from_everything_people_have(photographs):
    given = [
        photographs / "b.png",
        str(photographs / "b.png"),
        (photographs / "b.png").read_bytes(),
        Image.open(photographs / "b.png"),
        np.asarray(Image.open(photographs / "b.png")),
        lambda: Image.open(photographs / "b.png"),
    ]
    pictures = [read_image(Record("a", image).loader) for image in given]
    assert {(picture.mode, picture.tobytes()) for picture in pictures} == {("RGB", pictures[0].tobytes())}
    with pytest.raises(InputTypeError, match="image 'a': expected a path"):
        Record("a", 5)


def test_drawn_pictures_are_known_by_their_key_and_travel_to_workers():
    one, two = (Records([Record("a", Drawn(key))]).fingerprint for key in ("k1", "k2"))
    assert one != two
    assert Records([Record("a", Drawn("k"), label=np.int64(1))]).fingerprint  # NumPy's numbers are numbers
    loader = pickle.loads(pickle.dumps(Record("a", Drawn("k1")).loader))  # noqa: S301  our own bytes
    assert loader().size == (4, 4)


def test_transparent_and_grey_pictures_become_rgb(tmp_path):
    Image.new("P", (3, 3)).save(tmp_path / "palette.png", transparency=0)
    Image.new("L", (3, 3), 7).save(tmp_path / "grey.png")
    for name in ("palette.png", "grey.png"):
        assert read_image(Record("a", tmp_path / name).loader).mode == "RGB"


@pytest.mark.parametrize("damage", ["missing", "empty", "truncated", "text"])
def test_unreadable_pictures_say_which_and_why(photographs, damage):
    path = photographs / "a.jpg"
    content = path.read_bytes()
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes({"empty": b"", "truncated": content[: len(content) // 2], "text": b"not a picture"}[damage])
    with pytest.raises(UnreadableError, match=r"a\.jpg: \w+"):
        read_image(Record("a", path).loader)


@settings(deadline=None, max_examples=30)
@given(st.permutations([f"id{n}" for n in range(40)]), st.integers(0, 5))
def test_splits_depend_on_ids_and_seed_only(ids, seed):
    fractions = {"train": 0.7, "val": 0.1, "test": 0.2}
    names = assign_splits(ids, fractions, seed=seed)
    reference = assign_splits(sorted(ids), fractions, seed=seed)
    assert dict(zip(ids, names, strict=True)) == dict(zip(sorted(ids), reference, strict=True))
    assert [int((names == name).sum()) for name in fractions] == [28, 4, 8]


def test_splits_of_records():
    records = Records([Record(f"{n}", PICTURE, ["x"]) for n in range(10)], positives=[[0, 3]])
    drawn = records.with_splits({"a": 0.5, "b": 0.5}, seed=1)
    assert sorted(drawn.splits) == ["a"] * 5 + ["b"] * 5
    assert drawn.positives.tolist() == [[0, 3]]
    assert (drawn.splits != records.with_splits({"a": 0.5, "b": 0.5}, seed=2).splits).any()
    with pytest.raises(InputError, match="without splits"):
        drawn.with_splits({"a": 1.0})
    with pytest.raises(InputError, match="add up to 1"):
        records.with_splits({"a": 0.5, "b": 0.4})
    with pytest.raises(InputError, match="'b' of 10 images came out empty"):
        records.with_splits({"a": 0.99, "b": 0.01})
