use crate::error::Failure;
use std::fs;
use std::path::Path;
use std::process::Command;

use super::super::fault::POINTS;
use super::super::small_disk::{SmallDisk, names};
use super::*;
use crate::rng::philox4x32;

/// Writes a checkpoint with two files, with contents that depend on `text` and the step.
fn save(all: &Checkpoints, step: u64, text: &str, keep: usize) -> Result<PathBuf, Error> {
    let draft = all.begin(step)?;
    fs::create_dir(draft.path().join("state")).unwrap();
    fs::write(draft.path().join("weights"), format!("{text} of {step}").repeat(10)).unwrap();
    fs::write(draft.path().join("state/moments"), vec![step as u8; 1000]).unwrap();
    draft.commit(keep, None)
}

fn weights(path: &Path) -> String {
    fs::read_to_string(path.join("weights")).unwrap()
}

#[test]
fn checkpoints_are_saved_and_the_newest_are_kept() {
    let root = tempfile::tempdir().unwrap();
    let all = Checkpoints::open(&root.path().join("checkpoints")).unwrap();
    assert_eq!(all.newest_whole().unwrap(), None);
    for step in [10, 20, 30, 100_000_000] {
        let path = save(&all, step, "first", 2).unwrap();
        assert!(path.ends_with(format!("step-{step:08}")));
    }
    assert_eq!(all.list().unwrap(), [30, 100_000_000]);
    let newest = all.newest_whole().unwrap().unwrap();
    assert_eq!((newest.step, newest.warnings.len()), (100_000_000, 0));
    assert_eq!(names(&all.dir), ["step-00000030", "step-100000000"]);
}

#[test]
fn a_dropped_draft_and_other_leftovers_disappear_and_strangers_stay() {
    let root = tempfile::tempdir().unwrap();
    let all = Checkpoints::open(root.path()).unwrap();
    save(&all, 1, "first", 9).unwrap();
    drop(all.begin(2).unwrap());
    assert_eq!(names(root.path()), ["step-00000001"]);
    for name in [".draft-00000007", "step-00000008", "step-9", "notes"] {
        fs::create_dir(root.path().join(name)).unwrap();
    }
    let all = Checkpoints::open(root.path()).unwrap();
    assert_eq!(names(root.path()), ["notes", "step-00000001", "step-9"]);
    assert_eq!(all.list().unwrap(), [1]);
}

#[test]
fn saving_a_step_again_replaces_it_and_later_steps_are_abandoned() {
    let root = tempfile::tempdir().unwrap();
    let all = Checkpoints::open(root.path()).unwrap();
    save(&all, 1, "first", 9).unwrap();
    save(&all, 2, "first", 9).unwrap();
    save(&all, 1, "second", 1).unwrap();
    assert_eq!(all.list().unwrap(), [1]);
    assert!(weights(&all.newest_whole().unwrap().unwrap().path).starts_with("second"));
}

/// A save fails halfway (a full disk) and is repeated, with or without a restart.
#[test]
fn a_step_set_aside_survives_until_its_successor_is_whole() {
    for restart in [true, false] {
        let root = tempfile::tempdir().unwrap();
        let all = Checkpoints::open(root.path()).unwrap();
        let path = save(&all, 1, "first", 9).unwrap();
        let aside = root.path().join(".old-00000001");
        fs::rename(&path, &aside).unwrap();
        fs::create_dir(&path).unwrap();
        fs::write(path.join("weights"), "half").unwrap();
        if restart {
            let all = Checkpoints::open(root.path()).unwrap();
            assert!(weights(&all.newest_whole().unwrap().unwrap().path).starts_with("first"));
        } else {
            let draft = all.begin(1).unwrap();
            std::os::unix::fs::symlink("/", draft.path().join("x")).unwrap();
            assert!(draft.commit(9, None).is_err());
            assert!(aside.join(MARKER).exists(), "a failed save costs nothing");
        }
        save(&all, 1, "second", 9).unwrap();
        assert!(weights(&all.newest_whole().unwrap().unwrap().path).starts_with("second"));
        assert_eq!(names(root.path()), ["step-00000001"]);
    }
}

#[test]
fn damage_falls_back_and_says_so_and_total_damage_is_an_error() {
    let root = tempfile::tempdir().unwrap();
    let all = Checkpoints::open(root.path()).unwrap();
    save(&all, 1, "first", 9).unwrap();
    let newer = save(&all, 2, "first", 9).unwrap();
    fs::write(newer.join("state/moments"), b"short").unwrap();
    let found = all.newest_whole().unwrap().unwrap();
    assert_eq!(found.step, 1);
    assert!(found.warnings[0].contains("state/moments has 5 bytes"), "{:?}", found.warnings);
    fs::remove_file(found.path.join("weights")).unwrap();
    let error = all.newest_whole().unwrap_err();
    assert!(matches!(&error, Error::AllDamaged { damage, .. } if damage.len() == 2));
    assert_eq!(error.exit_code(), crate::ExitCode::Storage);
}

#[test]
fn a_folder_that_moved_to_another_steps_name_is_damaged() {
    let root = tempfile::tempdir().unwrap();
    let all = Checkpoints::open(root.path()).unwrap();
    let path = save(&all, 1, "first", 9).unwrap();
    fs::rename(path, root.path().join("step-00000005")).unwrap();
    assert!(all.newest_whole().unwrap_err().to_string().contains("is of step 1"));
}

#[test]
fn links_in_a_draft_are_refused() {
    let root = tempfile::tempdir().unwrap();
    let all = Checkpoints::open(root.path()).unwrap();
    let draft = all.begin(1).unwrap();
    std::os::unix::fs::symlink("/etc/hostname", draft.path().join("x")).unwrap();
    assert!(matches!(draft.commit(1, None), Err(Error::Unsafe { .. })));
    assert_eq!(names(root.path()), Vec::<String>::new());
}

/// The marker and manifest paths may be anything; a save neither hangs nor fails.
#[test]
fn markers_and_manifests_that_are_no_files_are_damage() {
    let make: [&dyn Fn(&Path); 3] = [
        &|p| fs::create_dir(p).unwrap(),
        &|p| rustix::fs::mkfifoat(rustix::fs::CWD, p, rustix::fs::Mode::RWXU).unwrap(),
        &|p| std::os::unix::fs::symlink("/dev/zero", p).unwrap(),
    ];
    for make in make {
        for name in [MARKER, MANIFEST] {
            let root = tempfile::tempdir().unwrap();
            let all = Checkpoints::open(root.path()).unwrap();
            save(&all, 1, "first", 9).unwrap();
            let path = save(&all, 2, "first", 9).unwrap();
            fs::remove_file(path.join(name)).unwrap();
            make(&path.join(name));
            assert_eq!(all.newest_whole().unwrap().unwrap().step, 1, "{name}");
            save(&all, 2, "second", 1).unwrap();
            assert!(weights(&all.newest_whole().unwrap().unwrap().path).starts_with("second"));
            assert_eq!(names(root.path()), ["step-00000002"]);
        }
    }
}

/// Reliability R7: detects all of 1,000 random single-bit flips and 200 truncations.
#[test]
fn every_flipped_bit_and_every_truncation_is_found() {
    let root = tempfile::tempdir().unwrap();
    let all = Checkpoints::open(root.path()).unwrap();
    let path = save(&all, 3, "first", 9).unwrap();
    let files = ["weights", "state/moments", MANIFEST, MARKER];
    let below = |round: usize, n: usize| philox4x32([round as u32, 0, 0, 0], [7, 7])[0] as usize % n;
    for round in 0..1200 {
        let file = path.join(files[round % files.len()]);
        let good = fs::read(&file).unwrap();
        let mut bad = good.clone();
        if round < 1000 {
            let bit = below(round, bad.len() * 8);
            bad[bit / 8] ^= 1 << (bit % 8);
        } else {
            bad.truncate(below(round, bad.len()));
        }
        fs::write(&file, &bad).unwrap();
        let found = all.newest_whole();
        assert!(matches!(found, Err(Error::AllDamaged { .. })), "{round} {file:?}: {found:?}");
        assert!(matches!(Checkpoints::check(&path), Err(Error::Damaged { .. })), "{round} {file:?}");
        fs::write(&file, &good).unwrap();
    }
    assert_eq!(all.newest_whole().unwrap().unwrap().step, 3);
    fs::rename(&path, root.path().join("copy")).unwrap();
    Checkpoints::check(&root.path().join("copy")).unwrap();
}

/// Reliability R6: the disk fills up at any moment of a save. Needs root to mount a small disk;
/// otherwise skipped with a message.
#[test]
fn a_disk_that_fills_up_costs_the_new_checkpoint_only() {
    let Some(root) = SmallDisk::new() else { return };
    let mut failures = 0;
    // From no free pages to plenty, so that each write of the commit fails in turn.
    for free in 0..8 {
        let dir = root.path().join(format!("run-{free}"));
        let all = Checkpoints::open(&dir).unwrap();
        save(&all, 1, "first", 2).unwrap();
        let draft = all.begin(2).unwrap();
        fs::write(draft.path().join("weights"), "second").unwrap();
        root.fill_but(free);
        let result = draft.commit(2, None);
        let text = result.as_ref().map_or_else(|e| e.to_string(), |_| String::new());
        let code = result.as_ref().map_or_else(|e| e.exit_code(), |_| crate::ExitCode::Storage);
        let newest = Checkpoints::open(&dir).unwrap().newest_whole().unwrap().unwrap();
        fs::remove_file(root.path().join("filler")).unwrap();
        assert_eq!(newest.step, if result.is_ok() { 2 } else { 1 }, "{free} pages: {text}");
        assert_eq!(code, crate::ExitCode::Storage);
        if result.is_err() {
            failures += 1;
            assert!(text.contains("run-") && text.contains("hint: free some space"), "{text}");
        }
        fs::remove_dir_all(dir).unwrap();
    }
    assert!((1..8).contains(&failures), "{failures} of 8 saves failed");
}

/// The child process of `every_fault_point_leaves_a_whole_checkpoint`, which is aborted at a fault point.
#[test]
#[ignore = "the child process of the fault test"]
fn fault_child() {
    let dir = std::env::var("FT_FAULT_DIR").expect("run by the fault test alone");
    let all = Checkpoints::open(Path::new(&dir)).unwrap();
    save(&all, 2, "second", 2).unwrap(); // again
    save(&all, 3, "second", 2).unwrap(); // purges step 1
    save(&all, 4, "second", 1).unwrap(); // purges steps 2 and 3
}

/// Reliability R1 and R9: the process dies at every fault point, at the first and second visit. Earlier
/// checkpoints stay intact, the next start removes all leftovers, and the run can continue.
#[test]
fn every_fault_point_leaves_a_whole_checkpoint() {
    for point in POINTS.iter().filter(|p| !p.starts_with("folder.")) {
        for hit in 1..=2 {
            let root = tempfile::tempdir().unwrap();
            let all = Checkpoints::open(root.path()).unwrap();
            save(&all, 1, "first", 9).unwrap();
            save(&all, 2, "first", 9).unwrap();
            let child = Command::new(std::env::current_exe().unwrap())
                .args(["store::checkpoint::tests::fault_child", "--exact", "--ignored"])
                .env("FT_FAULT", format!("{point}:{hit}"))
                .env("FT_FAULT_DIR", root.path())
                .output()
                .unwrap();
            // The child saves one step again, and reaches all other points at least twice.
            let once = *point == "commit.moved_aside";
            let died = !child.status.success();
            assert_eq!(died, hit == 1 || !once, "{point}:{hit}: {child:?}");

            let all = Checkpoints::open(root.path()).unwrap();
            let found = all.newest_whole().unwrap().expect("a whole checkpoint");
            assert!(found.warnings.is_empty(), "{point}:{hit}: {:?}", found.warnings);
            assert!(found.step >= 2, "{point}:{hit}: fell back to {}", found.step);
            let text = weights(&found.path);
            assert!(
                text == "first of 2".repeat(10) && found.step == 2
                    || text == format!("second of {}", found.step).repeat(10),
                "{point}:{hit}: {text}"
            );
            for name in names(root.path()) {
                assert!(name.starts_with("step-"), "{point}:{hit}: left {name}");
            }
            save(&all, 5, "third", 1).unwrap();
            assert_eq!(all.newest_whole().unwrap().unwrap().step, 5);
            assert_eq!(names(root.path()), ["step-00000005"]);
        }
    }
}
