"""Transforms, image files, LMDB and HDF5 sources: values, orders, and going on from a state."""

from __future__ import annotations

import json
import types

import numpy as np
import pytest

pytest.importorskip("google.protobuf")

from bedstone.frameworks.caffe import schema
from bedstone.frameworks.caffe.data_images import read_image
from bedstone.frameworks.caffe.data_sources import (
    Hdf5Source,
    ImageListSource,
    ImageSource,
    Prefetcher,
    image_list,
)
from bedstone.frameworks.caffe.data_transform import DataTransformer
from bedstone.spec.errors import InvalidDescriptor


def transformer(train=False, mean=None, **fields):
    return DataTransformer(schema.TransformationParameter(**fields), train, mean)


IMAGE = np.arange(2 * 5 * 6, dtype=np.uint8).reshape(2, 5, 6)


def fixed(*draws):
    """A generator that hands out these draws."""
    left = iter(draws)
    return types.SimpleNamespace(integers=lambda limit: _below(next(left), limit))


def _below(value, limit):
    assert value < limit
    return value


def test_nothing_to_do_is_a_float_copy():
    out = transformer()(IMAGE, fixed())
    assert out.dtype == np.float32
    np.testing.assert_array_equal(out, IMAGE)


def test_mean_value_and_scale():
    out = transformer(mean_value=[10, 20], scale=0.5)(IMAGE, fixed())
    expected = (IMAGE.astype("f") - np.array([10, 20], "f")[:, None, None]) * 0.5
    np.testing.assert_array_equal(out, expected)
    one = transformer(mean_value=[7])(IMAGE, fixed())
    np.testing.assert_array_equal(one, IMAGE.astype("f") - 7)


def test_crop_is_centred_in_testing():
    out = transformer(crop_size=3)(IMAGE, fixed())
    np.testing.assert_array_equal(out, IMAGE[:, 1:4, 1:4])


def test_crop_is_drawn_in_training_and_the_mean_image_is_cropped_along():
    mean = np.random.default_rng(0).random(IMAGE.shape, np.float32)
    out = transformer(train=True, mean=mean, crop_size=3)(IMAGE, fixed(2, 3))
    np.testing.assert_array_equal(out, IMAGE[:, 2:5, 3:6] - mean[:, 2:5, 3:6])


@pytest.mark.parametrize("mirrored", [0, 1])
def test_mirror_is_drawn_in_either_phase(mirrored):
    out = transformer(mirror=True, mean_value=[1], scale=2)(IMAGE, fixed(mirrored))
    expected = (IMAGE.astype("f") - 1) * 2
    np.testing.assert_array_equal(out, expected[:, :, ::-1] if mirrored else expected)


@pytest.mark.parametrize(
    ("fields", "mean", "argument"),
    [({"crop_size": 6}, None, "crop_size"), ({"mean_value": [1, 2, 3]}, None, "mean"),
     ({}, np.zeros((2, 4, 6)), "mean"),
     ({"mean_value": [1]}, np.zeros(IMAGE.shape), "mean_file and mean_value")],
)  # fmt: skip
def test_transform_refuses(fields, mean, argument):
    with pytest.raises(InvalidDescriptor, match=argument):
        transformer(mean=mean, **fields)(IMAGE, fixed())


def test_image_file_is_blue_first(tmp_path):
    image = pytest.importorskip("PIL.Image")
    pixels = np.zeros((4, 3, 3), np.uint8)
    pixels[..., 0], pixels[..., 2] = 200, 50  # red, blue
    path = tmp_path / "a.png"
    image.fromarray(pixels).save(path)
    got = read_image(path)
    assert got.shape == (3, 4, 3) and got.dtype == np.uint8
    assert got[0, 0, 0] == 50 and got[2, 0, 0] == 200
    assert read_image(path, colour=False).shape == (1, 4, 3)
    np.testing.assert_array_equal(read_image(path.read_bytes(), colour=None), got)


@pytest.mark.parametrize("size", [(7, 9), (40, 31), (16, 8)])
def test_resizing_is_opencv_s(tmp_path, size):
    cv2, image = pytest.importorskip("cv2"), pytest.importorskip("PIL.Image")
    pixels = np.random.default_rng(1).integers(0, 256, (17, 23, 3), dtype=np.uint8)
    path = tmp_path / "a.png"
    image.fromarray(pixels).save(path)
    expected = cv2.resize(cv2.imread(str(path)), size[::-1]).transpose(2, 0, 1)
    # One step of the 8 bits: OpenCV interpolates with 11-bit weights.
    np.testing.assert_allclose(read_image(path, size=size).astype(int), expected, atol=1)


@pytest.mark.parametrize("content", [None, b"", b"no image at all"])
def test_bad_image_is_named(tmp_path, content):
    pytest.importorskip("PIL")
    path = tmp_path / "bad.png"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InvalidDescriptor, match="bad.png"):
        read_image(path)


def counting(count=10, batch=4, **options):
    """Images that are all equal to their number."""
    return ImageSource(
        lambda record: (np.full((1, 3, 3), record, np.uint8), record),
        transformer(train=True, mirror=True, crop_size=2), count=count, batch_size=batch,
        **{"seed": 5} | options,
    )  # fmt: skip


def test_rounds_are_in_order_and_labels_go_with_images():
    source = counting()
    batches = [source.next_batch() for _ in range(5)]
    labels = np.concatenate([labels for _, labels in batches])
    np.testing.assert_array_equal(labels, np.arange(20) % 10)
    np.testing.assert_array_equal(np.concatenate([b[0] for b in batches])[:, 0, 1, 1], labels)


def test_shuffled_rounds_are_different_permutations():
    source = counting(batch=10, shuffle=True)
    first, second = (source.next_batch()[1] for _ in range(2))
    assert sorted(first) == sorted(second) == list(range(10))
    assert list(first) != list(second)
    again = counting(batch=10, shuffle=True)
    np.testing.assert_array_equal(again.next_batch()[1], first)
    assert list(counting(batch=10, shuffle=True, seed=6).next_batch()[1]) != list(first)


def test_rand_skip_starts_elsewhere():
    starts = set()
    for seed in range(20):
        source = counting(seed=seed)
        source.skip_at_random(10)
        starts.add(source.position)
    assert len(starts) > 5 and max(starts) < 10


@pytest.mark.parametrize("prefetched", [False, True])
@pytest.mark.parametrize("shuffle", [False, True])
def test_state_goes_on_bit_for_bit(shuffle, prefetched):
    wrap = Prefetcher if prefetched else lambda source: source
    random = np.random.default_rng(9).integers(0, 255, (7, 1, 6, 6), dtype=np.uint8)

    def source(seed):
        return wrap(ImageSource(
            lambda record: (random[record], record), transformer(True, mirror=True, crop_size=3),
            count=7, batch_size=3, seed=seed, shuffle=shuffle,
        ))  # fmt: skip

    one = source(1)
    for _ in range(4):
        one.next_batch()
    state = json.loads(json.dumps(one.state()))
    expected = [one.next_batch() for _ in range(5)]
    other = source(2)
    other.next_batch()
    other.restore(state)
    for wanted in expected:
        for a, b in zip(other.next_batch(), wanted):
            np.testing.assert_array_equal(a, b)


def test_state_of_other_data_is_refused():
    state = counting(count=10).state() | {"position": 8}
    with pytest.raises(InvalidDescriptor, match="other data"):
        counting(count=5).restore(state)


def test_prefetch_passes_an_error_on():
    def load(record):
        raise InvalidDescriptor("image", record, "one that can be read")

    source = ImageSource(load, transformer(), count=3, batch_size=1, seed=0)
    with pytest.raises(InvalidDescriptor, match="image"):
        Prefetcher(source).next_batch()


def test_images_of_two_sizes_in_a_batch_are_refused():
    source = ImageSource(
        lambda record: (np.zeros((1, 3 + record, 3), np.uint8), 0), transformer(),
        count=2, batch_size=2, seed=0,
    )  # fmt: skip
    with pytest.raises(InvalidDescriptor, match="image 1"):
        source.next_batch()


def test_image_list(tmp_path):
    image = pytest.importorskip("PIL.Image")
    for i in range(3):
        image.fromarray(np.full((4 + i, 4, 3), 10 * i, np.uint8)).save(tmp_path / f"a {i}.png")
    path = tmp_path / "list.txt"
    path.write_text("a 0.png 5\na 1.png 6\n\na 2.png 7\n")
    source = ImageListSource(
        path, transformer(), root=f"{tmp_path}/", size=(2, 3), batch_size=3, seed=0
    )
    images, labels = source.next_batch()
    assert images.shape == (3, 3, 2, 3)
    np.testing.assert_array_equal(labels, [5, 6, 7])
    np.testing.assert_array_equal(images[:, 0, 0, 0], [0, 10, 20])


@pytest.mark.parametrize("text", ["a.png", "a.png x", "a.png 1.5"])
def test_bad_line_of_an_image_list(tmp_path, text):
    path = tmp_path / "list.txt"
    path.write_text(f"good.png 1\n{text}\n")
    with pytest.raises(InvalidDescriptor, match="list.txt:2"):
        image_list(path)


def hdf5_list(folder, lengths):
    h5py = pytest.importorskip("h5py")
    names, start = [], 0
    for i, length in enumerate(lengths):
        names.append(str(folder / f"part{i}.h5"))
        with h5py.File(names[-1], "w") as file:
            rows = np.arange(start, start + length)
            file["data"] = np.repeat(rows, 6).reshape(length, 2, 3)
            file["label"] = rows
        start += length
    (folder / "list.txt").write_text("\n".join(names))
    return folder / "list.txt"


@pytest.mark.parametrize("shuffle", [False, True])
def test_hdf5_rows(tmp_path, shuffle):
    path = hdf5_list(tmp_path, [3, 5, 2])
    options = {"batch_size": 4, "shuffle": shuffle}
    source = Hdf5Source(path, ["data", "label"], seed=3, **options)
    batches = [source.next_batch() for _ in range(5)]  # 20 rows: two rounds
    labels = np.concatenate([label for _, label in batches])
    np.testing.assert_array_equal(np.concatenate([d for d, _ in batches])[:, 1, 2], labels)
    for turn in (labels[:10], labels[10:]):
        assert sorted(turn) == list(range(10))
        assert (list(turn) == list(range(10))) != shuffle
    other = Hdf5Source(path, ["data", "label"], seed=4, **options)
    third = Hdf5Source(path, ["data", "label"], seed=3, **options)
    third.next_batch()
    other.restore(json.loads(json.dumps(third.state())))
    for data, label in batches[1:]:
        again = other.next_batch()
        np.testing.assert_array_equal(again[0], data)
        np.testing.assert_array_equal(again[1], label)


def test_hdf5_refuses(tmp_path):
    path = hdf5_list(tmp_path, [3])
    with pytest.raises(InvalidDescriptor, match=r"mask.*data, label"):
        Hdf5Source(path, ["mask"], batch_size=1, seed=0, shuffle=False).next_batch()
    (tmp_path / "part0.h5").write_bytes(b"not HDF5")
    with pytest.raises(InvalidDescriptor, match="part0.h5"):
        Hdf5Source(path, ["data"], batch_size=1, seed=0, shuffle=False).next_batch()
    with pytest.raises(InvalidDescriptor, match="none.txt"):
        Hdf5Source(tmp_path / "none.txt", ["data"], batch_size=1, seed=0, shuffle=False)


class TestLmdb:
    @pytest.fixture(autouse=True)
    def _lmdb(self):
        pytest.importorskip("lmdb")

    def test_records_come_back(self, tmp_path):
        from bedstone.frameworks.caffe.lmdb_data import LmdbReader, write_lmdb

        path = tmp_path / "x_lmdb"
        images = np.random.default_rng(0).integers(0, 255, (6, 3, 4, 5), dtype=np.uint8)
        write_lmdb(path, images, range(6))
        write_lmdb(path, images / np.float32(3), range(6, 12), start=6)
        one, two = LmdbReader(path), LmdbReader(path)
        assert one.count == two.count == 12
        for number in (0, 1, 2, 11, 3, 3, 0, 0, 7):
            for reader in (one, two):
                image, label = reader.datum(number)
                source = images[number] if number < 6 else images[number - 6] / np.float32(3)
                np.testing.assert_array_equal(image, source)
                assert image.dtype == (np.uint8 if number < 6 else np.float32)
                assert label == number

    def test_encoded_record(self, tmp_path):
        import io

        import lmdb

        from bedstone.frameworks.caffe.lmdb_data import LmdbReader

        image = pytest.importorskip("PIL.Image")
        pixels = np.random.default_rng(0).integers(0, 255, (4, 5, 3), dtype=np.uint8)
        png = io.BytesIO()
        image.fromarray(pixels).save(png, "PNG")
        with lmdb.open(str(tmp_path / "x_lmdb")) as env, env.begin(write=True) as transaction:
            datum = schema.Datum(data=png.getvalue(), label=3, encoded=True)
            transaction.put(b"0", datum.SerializeToString())
            transaction.put(b"1", b"\xff\xff\xff")
            transaction.put(b"2", schema.Datum(channels=1, height=2, width=2, data=b"x")
                            .SerializeToString())  # fmt: skip
        reader = LmdbReader(tmp_path / "x_lmdb")
        got, label = reader.datum(0)
        np.testing.assert_array_equal(got, pixels[:, :, ::-1].transpose(2, 0, 1))
        assert label == 3
        for number, complaint in ((1, "record 1"), (2, r"record 2.*1 values.*\(1, 2, 2\)")):
            with pytest.raises(InvalidDescriptor, match=complaint):
                reader.datum(number)

    def test_no_database(self, tmp_path):
        from bedstone.frameworks.caffe.lmdb_data import LmdbReader, write_lmdb

        (tmp_path / "make_data.py").touch()
        with pytest.raises(InvalidDescriptor, match=r"nothing_lmdb.*make_data.py makes it"):
            LmdbReader(tmp_path / "nothing_lmdb")
        with pytest.raises(InvalidDescriptor, match="images"):
            write_lmdb(tmp_path / "y_lmdb", np.zeros((2, 3, 3)), [1, 2])
