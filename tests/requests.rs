//! Requests: many at a time, each as if it were alone.

#[path = "requests/emulated.rs"]
mod emulated;
#[path = "requests/faults.rs"]
mod faults;
#[path = "requests/lifecycle.rs"]
mod lifecycle;
#[path = "requests/numbers.rs"]
mod numbers;
#[path = "requests/random.rs"]
mod random;
#[path = "requests/service.rs"]
mod service;
#[path = "requests/streamed.rs"]
mod streamed;
mod support;
#[path = "requests/world.rs"]
mod world;
