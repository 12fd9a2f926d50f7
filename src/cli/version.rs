//! `ft --version`: version, commit, features.

use std::sync::LazyLock;

/// Version, commit with date, features of this build.
pub(super) const VERSION: &str = concat!(env!("CARGO_PKG_VERSION"), " (", env!("FT_BUILT_FROM"), ")");

/// The text of `ft --version`, without the program's name.
pub(super) fn long() -> &'static str {
    static TEXT: LazyLock<String> = LazyLock::new(|| {
        let all = [
            ("cuda", cfg!(feature = "cuda")),
            ("fault", cfg!(feature = "fault")),
            ("hub", cfg!(feature = "hub")),
            ("mpi", cfg!(feature = "mpi")),
            ("parquet", cfg!(feature = "parquet")),
            ("serve", cfg!(feature = "serve")),
        ];
        let features: Vec<&str> = all.into_iter().filter_map(|(name, on)| on.then_some(name)).collect();
        let cuda = if cfg!(feature = "cuda") {
            "CUDA by drivers from 12.4 on, where a device is used"
        } else {
            "no CUDA: run.device = \"cpu\""
        };
        format!("{VERSION}\nfeatures: {}\ndevices: {cuda}", features.join(", "))
    });
    &TEXT
}
