//! Tensor files: writing, reading, damage.

use ft_base::error::Failure;
use std::collections::BTreeMap;
use std::fs;
use std::ops::Range;
use std::os::unix::fs::symlink;
use std::path::Path;

use candle_core::{DType, Device, Tensor};
use half::{bf16, f16};

use super::header::tests::file_of;
use super::*;
use ft_base::ExitCode;

const CPU: Device = Device::Cpu;

fn tensor(values: &[f32], shape: &[usize], dtype: DType) -> Tensor {
    Tensor::from_slice(values, shape, &CPU).unwrap().to_dtype(dtype).unwrap()
}

/// A header of U8 tensors of one byte each.
fn bytes_named(names: &[&str]) -> Vec<u8> {
    let entries: Vec<_> = names
        .iter()
        .enumerate()
        .map(|(i, n)| format!(r#""{n}":{{"dtype":"U8","shape":[1],"data_offsets":[{i},{}]}}"#, i + 1))
        .collect();
    file_of(&format!("{{{}}}", entries.join(",")), names.len())
}

fn write_index(dir: &Path, map: &[(&str, &str)]) {
    let map: BTreeMap<_, _> = map.iter().copied().collect();
    let json = serde_json::json!({ "metadata": {}, "weight_map": map });
    fs::write(dir.join("model.safetensors.index.json"), json.to_string()).unwrap();
}

#[test]
fn written_tensors_are_read_back_by_ft_and_by_safetensors() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("adapter_model.safetensors");
    let tensors = vec![
        ("z.f32".to_string(), tensor(&[1.5, -2.0, 3.25, 0.1, 5.0, 6.0], &[3, 2], DType::F32)),
        ("a.bf16".to_string(), tensor(&[1.0, 2.0, 3.0], &[3], DType::BF16)),
        ("b.u8".to_string(), Tensor::new(&[1u8, 2, 255], &CPU).unwrap()),
        ("c.i64".to_string(), Tensor::new(&[i64::MIN, -1], &CPU).unwrap()),
        ("d.u32".to_string(), Tensor::new(7u32, &CPU).unwrap()),
        ("e.empty".to_string(), Tensor::zeros((0, 4), DType::F32, &CPU).unwrap()),
        // A non-contiguous view is written in logical order.
        ("f.view".to_string(), tensor(&[1., 2., 3., 4.], &[2, 2], DType::F32).t().unwrap()),
    ];
    write_file(&path, &tensors, &[("format", "pt"), ("a", "b")]).unwrap();

    let files = TensorFiles::open_file(&path).unwrap();
    assert_eq!(files.len(), 7);
    assert_eq!(files.metadata()["format"], "pt");
    assert_eq!(files.names().next(), Some("a.bf16"));
    for (name, wrote) in &tensors {
        let info = files.info(name).unwrap();
        assert_eq!(info.shape, wrote.dims());
        let read = files.tensor(name, wrote.dtype(), &CPU).unwrap();
        let same = read.flatten_all().unwrap().to_dtype(DType::F64).unwrap();
        let wrote = wrote.flatten_all().unwrap().to_dtype(DType::F64).unwrap();
        assert_eq!(same.to_vec1::<f64>().unwrap(), wrote.to_vec1::<f64>().unwrap(), "{name}");
    }
    let bytes = fs::read(&path).unwrap();
    let theirs = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    for name in files.names() {
        assert_eq!(theirs.tensor(name).unwrap().data(), files.read(name).unwrap(), "{name}");
    }
    // Rows 1 and 2 of [3, 2].
    let part = |name: &str, r: Range<usize>| files.part(name, r, DType::F32, &CPU);
    assert_eq!(part("z.f32", 2..6).unwrap().to_vec1::<f32>().unwrap(), [3.25, 0.1, 5.0, 6.0]);
    assert_eq!(part("z.f32", 2..2).unwrap().elem_count(), 0);
    for elements in [4..8, Range { start: 3, end: 2 }] {
        assert!(matches!(part("z.f32", elements), Err(Error::Rows { .. })));
    }
    let text = files.read("z.f23").unwrap_err().to_string();
    assert!(text.contains("nearest name is \"z.f32\""), "{text}");
}

#[test]
fn the_same_tensors_in_another_order_give_the_same_bytes() {
    let dir = tempfile::tempdir().unwrap();
    let mut tensors: Vec<_> =
        (0..20).map(|i| (format!("layer.{i}"), tensor(&[i as f32], &[1], DType::F32))).collect();
    let (a, b) = (dir.path().join("a"), dir.path().join("b"));
    write_file(&a, &tensors, &[("x", "1"), ("format", "pt")]).unwrap();
    tensors.reverse();
    write_file(&b, &tensors, &[("format", "pt"), ("x", "1")]).unwrap();
    assert_eq!(fs::read(a).unwrap(), fs::read(b).unwrap());
    tensors.push(tensors[0].clone());
    let error = write_file(&dir.path().join("c"), &tensors, &[]).unwrap_err();
    assert!(matches!(error, Error::Twice { .. }));
}

#[test]
fn conversions_round_as_candle_does() {
    // More than one piece, to test offsets between pieces; with ties and extremes.
    let n = (1 << 20) + 17;
    let mut values: Vec<f32> = (0..n).map(|i| (i as f32 * 0.37).sin() * 10f32.powi(i % 9 - 4)).collect();
    values[..4].copy_from_slice(&[1.0 + 1.0 / 256.0, 1.0 + 3.0 / 256.0, 65_280.0, -0.0]);
    let dir = tempfile::tempdir().unwrap();
    for from in [DType::F32, DType::BF16, DType::F16, DType::F64] {
        let source = tensor(&values, &[n as usize], from);
        let path = dir.path().join("x.safetensors");
        write_file(&path, &[("w".into(), source.clone())], &[]).unwrap();
        let files = TensorFiles::open_file(&path).unwrap();
        for to in [DType::F32, DType::BF16, DType::F16, DType::F64] {
            let read = files.tensor("w", to, &CPU).unwrap();
            assert_eq!(read.dtype(), to);
            let bits = |t: &Tensor| -> Vec<u64> {
                t.to_dtype(DType::F64)
                    .unwrap()
                    .to_vec1::<f64>()
                    .unwrap()
                    .into_iter()
                    .map(f64::to_bits)
                    .collect()
            };
            assert!(bits(&read) == bits(&source.to_dtype(to).unwrap()), "{from:?} to {to:?}");
        }
        let error = files.tensor("w", DType::U8, &CPU).unwrap_err();
        assert!(matches!(error, Error::Unread { .. }), "{error}");
    }
    // NaN, infinity, and overflow in the requested dtype are reported with an index.
    for (x, to, good) in [
        (f32::NAN, DType::F32, false),
        (f32::NEG_INFINITY, DType::BF16, false),
        (f32::MAX, DType::BF16, false),
        (65_520.0, DType::F16, false),
        (65_504.0, DType::F16, true),
        (f32::MAX, DType::F32, true),
    ] {
        let mut values = values.clone();
        values[n as usize - 2] = x;
        let path = dir.path().join("x.safetensors");
        write_file(&path, &[("w".into(), tensor(&values, &[1, n as usize], DType::F32))], &[]).unwrap();
        match TensorFiles::open_file(&path).unwrap().tensor("w", to, &CPU) {
            Ok(_) => assert!(good, "{x} to {to:?}"),
            Err(Error::NotFinite { at, .. }) => assert!(!good && at == [0, n as usize - 2], "{x} to {to:?}"),
            Err(e) => panic!("{e}"),
        }
    }
    // Ties to even, compared with the scalars of `half`.
    assert_eq!(bf16::from_f32(1.0 + 1.0 / 256.0).to_f32(), 1.0);
    assert_eq!(f16::from_f32(65520.0), f16::INFINITY);
}

#[test]
fn a_sharded_model_is_written_and_read_back() {
    let dir = tempfile::tempdir().unwrap();
    let entries: Vec<_> = (0..10).map(|i| (format!("w.{i}"), DType::F32, vec![4, 2])).collect();
    let make = |name: &str| {
        let i: f32 = name[2..].parse().unwrap();
        Ok(tensor(&[i; 8], &[4, 2], DType::F32))
    };
    let out = dir.path().join("model");
    let paths = write_sharded(&out, "model", &entries, 100, make).unwrap();
    let names: Vec<_> = paths.iter().map(|p| p.file_name().unwrap().to_str().unwrap()).collect();
    assert_eq!(names[0], "model-00001-of-00004.safetensors");
    assert_eq!(names[4], "model.safetensors.index.json");
    let files = TensorFiles::open_model(&out).unwrap();
    assert_eq!(files.len(), 10);
    assert_eq!(files.metadata()["format"], "pt");
    let w7 = files.tensor("w.7", DType::F32, &CPU).unwrap();
    assert_eq!(w7.to_vec2::<f32>().unwrap(), vec![vec![7.0; 2]; 4]);
    let index: serde_json::Value = serde_json::from_slice(&fs::read(&paths[4]).unwrap()).unwrap();
    assert_eq!(index["metadata"]["total_size"], 320);

    // Rewriting gives equal bytes. A single file replaces shards and leaves no old index.
    let before: Vec<_> = paths.iter().map(|p| fs::read(p).unwrap()).collect();
    let mut shuffled = entries.clone();
    shuffled.rotate_left(3);
    write_sharded(&out, "model", &shuffled, 100, make).unwrap();
    assert_eq!(before, paths.iter().map(|p| fs::read(p).unwrap()).collect::<Vec<_>>());
    let single = write_sharded(&out, "model", &entries[..2], u64::MAX, make).unwrap();
    assert_eq!(single, [out.join("model.safetensors")]);
    assert_eq!(TensorFiles::open_model(&out).unwrap().len(), 2);
    // Shards replace a single file.
    write_sharded(&out, "model", &entries, 100, make).unwrap();
    assert_eq!(TensorFiles::open_model(&out).unwrap().len(), 10);
    assert!(fs::read_dir(&out).unwrap().all(|e| !e.unwrap().file_name().to_str().unwrap().starts_with('.')));
}

#[test]
fn a_tensor_that_is_not_as_announced_stops_the_write_and_leaves_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let entries = vec![("w".to_string(), DType::F32, vec![2])];
    let error =
        write_sharded(dir.path(), "model", &entries, 100, |_| Ok(tensor(&[1.0; 3], &[3], DType::F32)));
    assert!(matches!(error.unwrap_err().of(), Some(Error::Announced { .. })));
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
}

#[test]
fn more_bytes_than_the_disk_has_is_refused_before_any_is_written() {
    let dir = tempfile::tempdir().unwrap();
    let entries = vec![("w".to_string(), DType::F32, vec![1 << 50])];
    let error = write_sharded(dir.path(), "model", &entries, 100, |_| unreachable!()).unwrap_err();
    let text = error.to_string();
    assert!(text.contains("4.0 PiB") && text.contains("free"), "{text}");
    assert_eq!(error.exit_code(), ExitCode::Storage);
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
}

/// On a full device, the message names the path and the bytes.
#[test]
fn a_full_disk_is_explained() {
    let error = Error::write_sized(
        "write",
        Path::new("/some/checkpoint"),
        Some(3 << 30),
        std::io::Error::from_raw_os_error(rustix::io::Errno::NOSPC.raw_os_error()),
    );
    let text = error.to_string();
    assert!(text.contains("/some/checkpoint") && text.contains("3.0 GiB"), "{text}");
    assert!(text.contains("hint: free some space"), "{text}");
    assert_eq!(error.exit_code(), ExitCode::Storage);
}

#[test]
fn an_index_and_its_shards_must_agree() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    fs::write(d.join("1.safetensors"), bytes_named(&["a"])).unwrap();
    fs::write(d.join("2.safetensors"), bytes_named(&["b"])).unwrap();
    let problem = || match TensorFiles::open_model(d) {
        Ok(_) => "none".to_string(),
        Err(e) => {
            assert_eq!(e.exit_code(), ExitCode::Model, "{e}");
            e.to_string()
        }
    };
    write_index(d, &[("a", "1.safetensors"), ("b", "2.safetensors")]);
    assert_eq!(problem(), "none");
    write_index(d, &[("a", "1.safetensors"), ("b", "2.safetensors"), ("c", "2.safetensors")]);
    assert!(problem().contains(r#""2.safetensors" for tensor "c""#));
    write_index(d, &[("a", "1.safetensors"), ("c", "2.safetensors")]);
    assert!(problem().contains(r#"tensor "b", which the index does not name"#));
    write_index(d, &[("a", "1.safetensors"), ("b", "1.safetensors")]);
    assert!(problem().contains(r#"names "1.safetensors" for tensor "b""#));
    write_index(d, &[("a", "1.safetensors"), ("b", "3.safetensors")]);
    assert!(problem().contains("3.safetensors"));
    write_index(d, &[("a", "1.safetensors"), ("b", "../2.safetensors")]);
    assert!(problem().contains(".."));
    write_index(d, &[("a", "pytorch_model.bin")]);
    assert!(problem().contains("pickle"));
    fs::write(d.join("2.safetensors"), bytes_named(&["b", "a"])).unwrap();
    write_index(d, &[("a", "1.safetensors"), ("b", "2.safetensors")]);
    assert!(problem().contains("in two shards"));
}

#[test]
fn folders_without_weights_say_what_they_have() {
    let dir = tempfile::tempdir().unwrap();
    let text = || TensorFiles::open_model(dir.path()).unwrap_err().to_string();
    assert!(text().contains("expected model.safetensors"));
    fs::write(dir.path().join("x.gguf"), b"").unwrap();
    assert!(text().contains("GGUF"));
    fs::write(dir.path().join("consolidated.safetensors"), b"").unwrap();
    assert!(text().contains("consolidated.safetensors"));
    fs::write(dir.path().join("pytorch_model.bin"), b"").unwrap();
    assert!(text().contains("save_pretrained"));
    let error = TensorFiles::open_file(&dir.path().join("adapter_model.bin")).unwrap_err();
    assert!(matches!(error, Error::Pickle { .. }));
    assert!(TensorFiles::open_model(&dir.path().join("missing")).is_err());
}

#[test]
fn a_hub_snapshot_loads_and_a_link_out_does_not() {
    let dir = tempfile::tempdir().unwrap();
    let repo = dir.path().join("models--owner--name");
    let snapshot = repo.join("snapshots/0123");
    fs::create_dir_all(&snapshot).unwrap();
    fs::create_dir_all(repo.join("blobs")).unwrap();
    fs::write(repo.join("blobs/aa"), bytes_named(&["w"])).unwrap();
    symlink("../../blobs/aa", snapshot.join("model.safetensors")).unwrap();
    let files = TensorFiles::open_model(&snapshot).unwrap();
    assert_eq!(files.read("w").unwrap(), [7]);

    let other = dir.path().join("other");
    fs::create_dir(&other).unwrap();
    symlink(repo.join("blobs/aa"), other.join("model.safetensors")).unwrap();
    assert!(matches!(TensorFiles::open_model(&other), Err(Error::Unsafe { .. })));
}

/// Reliability X5: with a mapping, this would be a SIGBUS.
#[test]
fn a_file_cut_short_after_open_is_an_error() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("x.safetensors");
    write_file(&path, &[("w".into(), tensor(&[1.0; 4096], &[4096], DType::F32))], &[]).unwrap();
    let files = TensorFiles::open_file(&path).unwrap();
    fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(1000).unwrap();
    for error in [
        files.read("w").unwrap_err(),
        files.part("w", 4000..4096, DType::F32, &CPU).unwrap_err(),
        files.tensor("w", DType::BF16, &CPU).unwrap_err(),
    ] {
        assert!(matches!(error, Error::CutShort { .. }), "{error}");
    }
}
