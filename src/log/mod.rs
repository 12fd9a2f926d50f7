//! Part of ft.
