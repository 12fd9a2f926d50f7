//! The key for the processes of a run to recognize one another.
//!
//! The key itself is never sent: each side of a connection proves possession, by a keyed BLAKE3 hash of random numbers
//! of both sides. The key comes from `FT_KEY`, or, for ranks of one machine, from a file written by rank 0 for its user
//! alone.

use ft_base::store;
use std::fs::File;
use std::io::Read;
use std::path::PathBuf;

/// Environment variable with a secret text, the same for all processes.
pub const VARIABLE: &str = "FT_KEY";
/// Least length of the text in bytes.
const SHORTEST: usize = 16;
const HINT: &str = "export FT_KEY=$(openssl rand -hex 32), the same for all processes";

/// A key of 256 bits.
#[derive(Clone, Copy)]
pub struct Key([u8; 32]);

impl Key {
    /// A new key.
    pub fn random() -> Result<Self, String> {
        Ok(Self(random()?))
    }

    /// The key with these bytes, if they are 32.
    pub fn of_bytes(bytes: &[u8]) -> Option<Self> {
        bytes.try_into().ok().map(Self)
    }

    /// The bytes of the key.
    pub fn bytes(&self) -> &[u8] {
        &self.0
    }

    /// Keyed hash of a list of byte strings, for one purpose.
    pub fn prove(&self, purpose: u8, parts: &[&[u8]]) -> blake3::Hash {
        let mut hasher = blake3::Hasher::new_keyed(&self.0);
        hasher.update(&[purpose]);
        for part in parts {
            hasher.update(&(part.len() as u64).to_le_bytes()).update(part);
        }
        hasher.finalize()
    }

    /// Key of one connection.
    pub fn derive(&self, purpose: u8, parts: &[&[u8]]) -> Self {
        Self(*self.prove(purpose, parts).as_bytes())
    }
}

/// Random bytes of the system.
pub fn random() -> Result<[u8; 32], String> {
    let mut bytes = [0; 32];
    File::open("/dev/urandom").and_then(|mut f| f.read_exact(&mut bytes)).map_err(|e| e.to_string())?;
    Ok(bytes)
}

/// A random text for [`VARIABLE`].
pub fn random_text() -> Result<String, String> {
    Ok(blake3::Hash::from_bytes(random()?).to_hex().to_string())
}

/// Source of the key of a run's processes.
pub enum Source {
    /// The launcher, or MPI.
    Given(Key),
    /// A file of rank 0, on this machine.
    File(PathBuf),
}

impl Source {
    /// The source for a rendezvous at `port` of this machine, or of several machines.
    ///
    /// # Errors
    /// Several machines and no `FT_KEY`; a short `FT_KEY`; no folder for a file.
    pub fn find(port: u16, one_machine: bool) -> Result<Self, String> {
        let text = std::env::var_os(VARIABLE).filter(|v| !v.is_empty());
        match text.as_ref().map(|t| t.as_encoded_bytes()) {
            Some(text) if text.len() < SHORTEST => {
                Err(format!("{VARIABLE} has fewer than {SHORTEST} characters\n  hint: {HINT}"))
            }
            Some(text) => Ok(Self::Given(Key(blake3::derive_key("ft: the key of a run's ranks", text)))),
            None if !one_machine => Err(format!(
                "ranks on several machines meet with a key, and {VARIABLE} is not set\n  hint: {HINT}"
            )),
            None => {
                let host = rustix::system::uname().nodename().to_string_lossy().replace('/', "_");
                let folder = store::cache_folder().ok_or_else(|| {
                    format!("no folder for the key of the ranks: HOME is not set\n  hint: {HINT}")
                })?;
                Ok(Self::File(folder.join("ranks").join(format!("{host}-{port}.key"))))
            }
        }
    }

    /// The key, as rank 0: writes the file.
    pub fn issue(&self) -> Result<(Key, Issued), String> {
        match self {
            Self::Given(key) => Ok((*key, Issued(None))),
            Self::File(path) => {
                let key = Key::random()?;
                let issued = Issued(Some(path.clone()));
                store::write_private(path, key.bytes()).map_err(|e| format!("{e}\n  hint: {HINT}"))?;
                Ok((key, issued))
            }
        }
    }

    /// The key, as another rank.
    ///
    /// # Errors
    /// No file of this user alone.
    pub fn get(&self) -> Result<Key, String> {
        match self {
            Self::Given(key) => Ok(*key),
            Self::File(path) => store::read_private(path, 32)
                .map_err(|e| e.to_string())
                .and_then(|bytes| Key::of_bytes(&bytes).ok_or_else(|| "it is no key".into()))
                .map_err(|why| format!("the key of rank 0, {}: {why}\n  hint: {HINT}", path.display())),
        }
    }
}

/// The file of a key; removed on drop.
pub struct Issued(Option<PathBuf>);

impl Drop for Issued {
    fn drop(&mut self) {
        if let Some(path) = &self.0 {
            let _ = std::fs::remove_file(path);
        }
    }
}
