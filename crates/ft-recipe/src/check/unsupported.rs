//! Values accepted by `ft plan` but missing in this build of `ft run`.

use crate::syntax::{Diagnostic, SourceText, Table, Value};
use std::collections::BTreeSet;

/// Refuses `parallel.comm = "mpi"` in a build without the feature `mpi`. Skips keys in `bad`, already reported.
pub(crate) fn find(root: &Table, texts: &[SourceText], bad: &BTreeSet<String>) -> Option<Diagnostic> {
    const KEY: &str = "parallel.comm";
    // the default build has no MPI, because few machines have the required libraries
    const HINT: &str = "cargo build --release --features mpi (needs an MPI and libclang: libopenmpi-dev, \
        openmpi-bin, libclang-dev)";
    let node = root.find(KEY).filter(|node| matches!(&node.value, Value::Text(word) if word == "mpi"));
    let node = node.filter(|_| !cfg!(feature = "mpi") && !bad.contains(KEY))?;
    let message = format!("not built yet: {KEY} = {}", node.value);
    Some(Diagnostic::new(texts, &node.at, message).key(KEY).hint(HINT))
}
