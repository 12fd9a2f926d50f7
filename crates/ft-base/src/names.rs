//! Names of hosts and users in a static binary.

/// Restricts glibc's lookups to `/etc/hosts`, DNS and `/etc/passwd`, for a binary that is linked with it statically.
/// Called before other threads exist.
///
/// glibc loads the other services of `/etc/nsswitch.conf` (mDNS, systemd's) as shared libraries, also into a static
/// binary. They need the C library of the machine, and the process ends by a signal where that has another version.
pub fn without_modules() {
    #[cfg(target_env = "gnu")]
    for (database, services) in [(c"hosts", c"files dns"), (c"passwd", c"files")] {
        use std::ffi::{c_char, c_int};
        unsafe extern "C" {
            fn __nss_configure_lookup(database: *const c_char, services: *const c_char) -> c_int;
        }
        // SAFETY: both strings end with a null. `main` calls this first, when no other thread looks names up.
        unsafe { __nss_configure_lookup(database.as_ptr(), services.as_ptr()) };
    }
}
