//! How the library is linked.

fn main() {
    // Triton closes a backend whose last model was unloaded; threads that end by themselves need
    // its code until then.
    println!("cargo::rustc-cdylib-link-arg=-Wl,-z,nodelete");
    println!("cargo::rerun-if-changed=build.rs");
}
