//! Version of PTX. Part of build.rs too.

/// Newest version that the oldest supported driver compiles: CUDA 12.4 (NVIDIA's table of PTX releases).
const NEWEST: (u32, u32) = (8, 4);

/// PTX with its version lowered to the newest that every supported driver compiles.
///
/// nvcc writes its own version whatever the instructions are. ptxas refuses instructions newer than the version, and
/// so does the driver's compiler.
pub fn lowered(ptx: &str) -> String {
    const KEY: &str = "\n.version ";
    let lower = || {
        let start = ptx.find(KEY)? + KEY.len();
        let end = start + ptx[start..].find(['\n', '\r', ' '])?;
        let (major, minor) = ptx[start..end].split_once('.')?;
        let is = (major.parse::<u32>().ok()?, minor.parse::<u32>().ok()?);
        (is > NEWEST).then(|| format!("{}{}.{}{}", &ptx[..start], NEWEST.0, NEWEST.1, &ptx[end..]))
    };
    lower().unwrap_or_else(|| ptx.into())
}
