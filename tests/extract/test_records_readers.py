import gzip
import io
import json
import os
import tarfile
import warnings
from pathlib import Path

import pytest

from grove_adapters.errors import InputError, InputTypeError, UnreadableError
from grove_adapters.extract import read_records
from grove_adapters.extract.records import read_image
from grove_adapters.extract.records.reading import recognise

DATA = Path(os.environ.get("GROVE_ADAPTERS_DATA", Path(__file__).parents[3] / "shared" / "data"))


def texts(records):
    return {record.id: [caption.text for caption in record.captions] for record in records}


# folders ------------------------------------------------------------------------------------------------------------


def test_csv_rows_are_gathered_and_commas_stay_in_captions(photographs):
    (photographs / "captions.csv").write_text(
        "image,split,label,source,caption\n"
        'a.jpg,train,cat,web,"A cat, asleep, on a ""mat"""\n'
        "b.png,test,dog,web,A dog, running, unquoted\n"
        'a.jpg,train,cat,book,"Two\nlines"\n'
    )
    records = read_records(photographs)
    assert texts(records) == {
        "a.jpg": ['A cat, asleep, on a "mat"', "Two\nlines"],
        "b.png": ["A dog, running, unquoted"],
    }
    assert [(record.split, record.label) for record in records] == [("train", "cat"), ("test", "dog")]
    assert [caption.columns for caption in records.captions] == [
        {"source": "web"},
        {"source": "book"},
        {"source": "web"},
    ]
    assert [read_image(record.loader).mode for record in records] == ["RGB", "RGB"]


def test_unquoted_commas_that_cannot_be_placed_are_refused_with_the_line(photographs):
    (photographs / "captions.csv").write_text("caption,image\nA cat, asleep,a.jpg\n")
    with pytest.raises(UnreadableError, match=r"captions\.csv line 2: expected 2 fields \(caption, image\), got 3"):
        read_records(photographs)


def test_jsonl_with_lists_ids_and_hugging_face_names(photographs):
    rows = [
        {"file_name": "a.jpg", "text": ["one", "two"], "image_id": 7, "caption_id": "c7"},
        {"file_name": "b.png", "text": "three", "image_id": 8},
    ]
    (photographs / "metadata.jsonl").write_text("\n\n".join(map(json.dumps, rows)))
    records = read_records(photographs, split="val")
    assert texts(records) == {"7": ["one", "two"], "8": ["three"]}
    assert [caption.id for caption in records.captions] == ["c7#0", "c7#1", "8#0"]
    assert set(records.splits) == {"val"}


@pytest.mark.parametrize("value", [5, None, {"a": 1}, ["fine", 3]])
def test_a_caption_that_is_not_text_is_refused_with_line_and_image(photographs, value):
    (photographs / "captions.jsonl").write_text(json.dumps({"image": "a.jpg", "caption": value}))
    with pytest.raises(InputTypeError, match=r"captions\.jsonl line 1 \(image 'a\.jpg'\): expected a caption as text"):
        read_records(photographs)


def test_tables_may_lie_elsewhere_be_tabbed_or_gzipped(photographs, tmp_path):
    with gzip.open(tmp_path / "table.tsv.gz", "wt", encoding="utf-8") as handle:
        handle.write("path\tdescription\na.jpg\tÄ cat, at rest\n")
    assert texts(read_records(tmp_path / "table.tsv.gz", images=photographs)) == {"a.jpg": ["Ä cat, at rest"]}


@pytest.mark.parametrize(
    ("content", "error", "message"),
    [
        ("image,label\na.jpg,1\n", UnreadableError, "expected a column for the caption"),
        ("name,caption\na.jpg,x\n", UnreadableError, "expected a column for the picture's file name"),
        ("image,caption,label\na.jpg,x,1\na.jpg,y,2\n", InputError, "one file, split and label for image 'a.jpg'"),
        ("image,caption\n", InputError, "at least one image"),
        ("", InputError, "at least one image"),
        ("image,caption\na.jpg,\n", InputError, "blank"),
    ],
)
def test_tables_that_cannot_be_used_say_why(photographs, content, error, message):
    (photographs / "captions.csv").write_text(content)
    with pytest.raises(error, match=message):
        read_records(photographs)


def test_missing_and_unreadable_tables(photographs):
    with pytest.raises(UnreadableError, match=r"expected captions\.csv, captions\.jsonl or metadata\.csv"):
        read_records(photographs)
    with pytest.raises(UnreadableError, match="got nothing"):
        read_records(photographs / "nowhere")
    (photographs / "captions.csv").write_bytes(b"image,caption\na.jpg,\xff\xfe\n")
    with pytest.raises(UnreadableError, match="expected a UTF-8 table"):
        read_records(photographs)
    (photographs / "captions.csv").unlink()
    (photographs / "captions.jsonl").write_text('{"image": "a.jpg", "caption": "x"}\n{"image": \n')
    with pytest.raises(UnreadableError, match="line 2: expected one JSON object"):
        read_records(photographs)


# COCO ---------------------------------------------------------------------------------------------------------------


def coco(**changes):
    content = {
        "images": [{"id": 9, "file_name": "a.jpg", "height": 1}, {"id": 4, "file_name": "b.png"}],
        "annotations": [
            {"image_id": 4, "id": 38, "caption": "A dog, twice."},
            {"image_id": 9, "id": 39, "caption": "A cat."},
            {"image_id": 4, "id": 40, "caption": "Dog."},
        ],
    }
    return {**content, **changes}


def test_coco_keeps_its_own_ids(photographs):
    (photographs / "captions.json").write_text(json.dumps(coco()))
    records = read_records(photographs / "captions.json", split="val")
    assert texts(records) == {"9": ["A cat."], "4": ["A dog, twice.", "Dog."]}
    assert [caption.id for caption in records.captions] == ["39", "38", "40"]
    assert records[0].loader.path == str(photographs / "a.jpg")
    assert set(records.splits) == {"val"}


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"images": [{"id": 9}]}, UnreadableError, "another structure"),
        ({"annotations": 5}, UnreadableError, "another structure"),
        ({"annotations": [{"image_id": 5, "id": 1, "caption": "x"}]}, UnreadableError, "image 5, which is not listed"),
        ({"annotations": [{"image_id": 9, "id": 1, "caption": 3}]}, InputTypeError, "'1' of image '9': expected text"),
    ],
)
def test_coco_files_that_cannot_be_used_say_why(photographs, changes, error, message):
    (photographs / "captions.json").write_text(json.dumps(coco(**changes)))
    with pytest.raises(error, match=message):
        read_records(photographs / "captions.json")


def test_karpathy_brings_splits_and_joins_with_coco_ids(photographs):
    (photographs / "val2014").mkdir()
    (photographs / "a.jpg").rename(photographs / "val2014" / "a.jpg")
    image = {"filename": "a.jpg", "filepath": "val2014", "imgid": 0, "cocoid": 522418, "split": "restval"}
    image["sentences"] = [{"raw": "A woman, cutting cake.", "sentid": 681330, "tokens": ["a"]}]
    flickr = {"filename": "b.png", "imgid": 1, "split": "test", "sentences": [{"raw": "A dog.", "sentid": 5}]}
    (photographs / "dataset.json").write_text(json.dumps({"dataset": "coco", "images": [image, flickr]}))
    records = read_records(photographs / "dataset.json")
    assert texts(records) == {"522418": ["A woman, cutting cake."], "1": ["A dog."]}
    assert records.splits.tolist() == ["train", "test"]
    assert [caption.id for caption in records.captions] == ["681330", "5"]
    assert all(read_image(record.loader) for record in records)
    with pytest.raises(InputError, match="its own splits"):
        read_records(photographs / "dataset.json", split="test")
    del image["cocoid"], image["imgid"]
    (photographs / "dataset.json").write_text(json.dumps({"images": [image]}))
    with pytest.raises(UnreadableError, match="another structure"):
        read_records(photographs / "dataset.json")


# HierarCaps ---------------------------------------------------------------------------------------------------------

HIERARCHIES = (
    "id,captions,image_url\n"
    '0,"table => table with plates => three plates, a man => A table, with food.",http://x.org/val2014/a.jpg\n'
    "1,bird => blue bird => blue bird on branch => A blue bird on a branch,http://x.org/val2014/b.png\n"
)


def test_hierarcaps_levels_run_from_vague_to_full(photographs, tmp_path):
    (tmp_path / "h.csv").write_text(HIERARCHIES)
    records = read_records(tmp_path / "h.csv", images=photographs)
    assert texts(records)["a"] == ["table", "table with plates", "three plates, a man", "A table, with food."]
    assert [caption.id for caption in records.captions][3:5] == ["0#4", "1#1"]
    assert [caption.columns["level"] for caption in records.captions] == [1, 2, 3, 4] * 2
    assert set(records.splits) == {"test"}
    assert all(read_image(record.loader) for record in records)


def test_hierarcaps_expanded_table_gathers_the_hierarchies_of_an_image(photographs, tmp_path):
    with gzip.open(tmp_path / "h.csv.gz", "wt") as handle:
        handle.write("positive,negative,image_url\na => b,c => d,u/a.jpg\ne => f,g => h,u/a.jpg\n")
    records = read_records(tmp_path / "h.csv.gz", images=photographs)
    assert texts(records) == {"a": ["a", "b", "e", "f"]}


def test_hierarcaps_of_another_structure_is_refused(tmp_path):
    (tmp_path / "h.csv").write_text("id,caption\n0,a => b\n")
    with pytest.raises(UnreadableError, match="expected the columns captions"):
        read_records(tmp_path / "h.csv", format="hierarcaps")


# webdataset ---------------------------------------------------------------------------------------------------------


def shard(path, members):
    with tarfile.open(path, "w") as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))


def test_webdataset_shards_are_read_at_their_offsets(photographs, tmp_path):
    pictures = {name: (photographs / name).read_bytes() for name in ("a.jpg", "b.png", "c.jpg")}
    folder = tmp_path / "shards"
    folder.mkdir()
    shard(
        folder / "00000.tar",
        {
            "000.JPG": pictures["a.jpg"],
            "000.txt": b"A cat, asleep\n",
            "000.json": b'{"caption": "ignored"}',
            "000.cls": b"3",
            "sub/001.png": pictures["b.png"],
            "sub/001.json": json.dumps({"captions": ["one", "two"]}).encode(),
            "sub/001.depth.npy": b"?",
        },
    )
    shard(folder / "00001.tar", {"002.jpg": pictures["c.jpg"], "003.txt": b"no picture"})
    records = read_records(folder, split="train")
    assert texts(records) == {"000": ["A cat, asleep"], "sub/001": ["one", "two"], "002": []}
    assert records[0].label == "3"
    assert records[1].loader.path == f"{folder / '00000.tar'}/sub/001.png"
    moved = folder.rename(tmp_path / "moved")
    assert read_records(moved, split="train").fingerprint == records.fingerprint
    moved.rename(folder)
    for record, name in zip(records, pictures, strict=True):
        assert read_image(record.loader).tobytes() == read_image(type(record)("x", photographs / name).loader).tobytes()


def test_webdataset_reads_what_the_webdataset_library_writes(photographs, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        webdataset = pytest.importorskip("webdataset")
        with webdataset.TarWriter(str(tmp_path / "s.tar")) as sink:
            sink.write({"__key__": "k0", "jpg": (photographs / "a.jpg").read_bytes(), "txt": "Ä cat", "json": {"x": 1}})
    records = read_records(tmp_path / "s.tar")
    assert texts(records) == {"k0": ["Ä cat"]}
    assert read_image(records[0].loader).size == (40, 56)


def test_shards_that_cannot_be_used_say_why(photographs, tmp_path):
    picture = (photographs / "a.jpg").read_bytes()
    with tarfile.open(tmp_path / "z.tar", "w:gz") as archive:
        archive.add(photographs / "a.jpg", "a.jpg")
    with pytest.raises(UnreadableError, match="uncompressed tar"):
        read_records(tmp_path / "z.tar")
    shard(tmp_path / "twice.tar", {"a.jpg": picture, "a.png": picture})
    with pytest.raises(UnreadableError, match="second one"):
        read_records(tmp_path / "twice.tar")
    shard(tmp_path / "json.tar", {"a.jpg": picture, "a.json": b"{"})
    with pytest.raises(UnreadableError, match=r"a\.json"):
        read_records(tmp_path / "json.tar")
    shard(tmp_path / "number.tar", {"a.jpg": picture, "a.json": b'{"caption": 5}'})
    with pytest.raises(InputTypeError, match="'a#0' of image 'a': expected text"):
        read_records(tmp_path / "number.tar")
    with pytest.raises(InputError, match="hold their pictures"):
        read_records(tmp_path / "json.tar", images=photographs)
    (tmp_path / "empty").mkdir()
    with pytest.raises(UnreadableError, match="got none"):
        read_records(tmp_path / "empty", format="webdataset")


# the entrance -------------------------------------------------------------------------------------------------------


def test_formats_are_recognised(photographs, tmp_path):
    (tmp_path / "coco.json").write_text(json.dumps(coco()))
    (tmp_path / "h.csv").write_text(HIERARCHIES)
    (tmp_path / "c.csv").write_text("image,caption\na.jpg,x, y\n")
    shard(tmp_path / "s.tar", {})
    names = ("coco.json", "h.csv", "c.csv", "s.tar")
    assert [recognise(tmp_path / name) for name in names] == ["coco", "hierarcaps", "folder", "webdataset"]
    assert recognise(photographs) == "folder"
    (tmp_path / "x.json").write_text("{}")
    with pytest.raises(UnreadableError, match="name the format"):
        recognise(tmp_path / "x.json")
    with pytest.raises(InputError, match="did you mean 'coco'"):
        read_records(tmp_path / "coco.json", format="cocoo")


@pytest.mark.skipif(not DATA.is_dir(), reason="no real data: set GROVE_ADAPTERS_DATA")
def test_real_files():
    hierarcaps = read_records(
        DATA / "hierarcaps" / "data" / "hierarcaps_test.csv", images=DATA / "hierarcaps" / "assets" / "test_imgs"
    )
    assert (len(hierarcaps), len(hierarcaps.captions)) == (1000, 4000)
    assert read_image(hierarcaps[0].loader).size == (256, 256)
    coco_val = read_records(DATA / "coco_val2017" / "captions_val2017.json")
    assert (len(coco_val), len(coco_val.captions)) == (5000, 25014)
