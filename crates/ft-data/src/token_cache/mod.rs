//! Stores encoded samples: token and index files, kept between commands.
//!
//! | file | contents |
//! |---|---|
//! | `pass` | reads one source once; counts and refuses rows |
//! | `samples`, `record` | token and index files; on-disk layout |
//! | `cache` | files kept between commands |
//! | `bytes` | positioned reads, and integer lists that spill to disk |
//! | `stats` | counts of rows read, used and dropped |
//! | `teacher_rows` | files of tokens with a teacher's values |

pub(crate) mod bytes;
pub(crate) mod cache;
pub(crate) mod pass;
pub(crate) mod record;
pub(crate) mod samples;
pub(crate) mod stats;
pub(crate) mod teacher_rows;
