//! Names of hosts and users in a static binary.

/// Restricts lookups to `/etc/hosts`, DNS and `/etc/passwd` in a binary that is linked with glibc statically. Does
/// nothing in others.
///
/// glibc loads the other services of `/etc/nsswitch.conf` (mDNS, systemd's) as shared libraries, also into a static
/// binary. They need the C library of the machine, and the process ends by a signal where that has another version.
/// Call it before there are threads.
pub fn without_modules() {
    #[cfg(all(target_env = "gnu", target_feature = "crt-static"))]
    for (database, services) in [(c"hosts", c"files dns"), (c"passwd", c"files")] {
        use std::ffi::{c_char, c_int};
        unsafe extern "C" {
            fn __nss_configure_lookup(database: *const c_char, services: *const c_char) -> c_int;
        }
        // SAFETY: both strings end with a null. `main` calls this first, when no other thread looks names up.
        unsafe { __nss_configure_lookup(database.as_ptr(), services.as_ptr()) };
    }
}
