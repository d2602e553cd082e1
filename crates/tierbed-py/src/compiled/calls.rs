//! Functions of torch and of compiled models, found by name at run time.
//!
//! Signatures are those of torch's stable C interface: `aoti_torch/c/shim.h` and
//! `aoti_runtime/interface.h` of torch 2.11. A compiled model of another torch is refused before it
//! is loaded. All functions but a few that cannot fail return 0 when they did.

use std::ffi::{c_char, c_int, c_void};
use std::path::Path;
use std::sync::OnceLock;

use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};
use tierbed_core::Result;

/// A tensor, a compiled model, a stream: what only its library knows.
pub(super) type Handle = *mut c_void;
type Text = *const c_char;
type Sizes = *const i64;

/// `<dlfcn.h>`, Linux: only a library that is loaded already.
const RTLD_NOLOAD: c_int = 4;

/// A constant of a compiled model, and the tensor to take its place.
#[repr(C)]
pub(super) struct Pair {
    pub(super) name: Text,
    pub(super) tensor: Handle,
}

macro_rules! c_interface {
    ($about:literal $name:ident of $prefix:literal {
        $($function:ident($($argument:ty),*) -> $returned:ty;)*
    }) => {
        #[doc = $about]
        #[allow(non_snake_case, reason = "the names are torch's")]
        pub(super) struct $name {
            // SAFETY: of every call: the types are those of torch's header.
            $(pub(super) $function: unsafe extern "C" fn($($argument),*) -> $returned,)*
        }

        impl $name {
            fn of(library: &Library) -> std::result::Result<Self, libloading::Error> {
                // SAFETY: the types are those of torch's header; the library is never unloaded.
                unsafe {
                    Ok(Self { $($function: *library.get(
                        concat!($prefix, stringify!($function), "\0").as_bytes(),
                    )?,)* })
                }
            }
        }
    };
}

c_interface! {
    "Functions of torch itself, without their prefix."
    Torch of "aoti_torch_" {
        abi_version() -> u64;
        device_type_cpu() -> i32;
        layout_strided() -> i32;
        dtype_float32() -> i32;
        dtype_float64() -> i32;
        dtype_float16() -> i32;
        dtype_bfloat16() -> i32;
        dtype_int64() -> i32;
        dtype_int32() -> i32;
        dtype_uint8() -> i32;
        dtype_int8() -> i32;
        dtype_bool() -> i32;
        create_tensor_from_blob_v2(
            *mut c_void, i64, Sizes, Sizes, i64, i32, i32, i32, *mut Handle, i32, *const u8, i64
        ) -> i32;
        delete_tensor_object(Handle) -> i32;
        get_data_ptr(Handle, *mut *mut c_void) -> i32;
        get_dtype(Handle, *mut i32) -> i32;
        get_dim(Handle, *mut i64) -> i32;
        get_size(Handle, i64, *mut i64) -> i32;
        get_stride(Handle, i64, *mut i64) -> i32;
    }
}

c_interface! {
    "Functions of a compiled model, without their prefix."
    ModelCalls of "AOTInductorModelContainer" {
        CreateWithDevice(*mut Handle, usize, Text, Text) -> i32;
        Delete(Handle) -> i32;
        GetNumInputs(Handle, *mut usize) -> i32;
        GetNumOutputs(Handle, *mut usize) -> i32;
        GetNumConstants(Handle, *mut usize) -> i32;
        GetConstantName(Handle, usize, *mut Text) -> i32;
        GetConstantOriginalFQN(Handle, usize, *mut Text) -> i32;
        GetConstantType(Handle, usize, *mut i32) -> i32;
        GetConstantDtype(Handle, usize, *mut i32) -> i32;
        UpdateUserManagedConstantBufferPairs(Handle, *const Pair, usize, bool, bool) -> i32;
        Run(Handle, *mut Handle, usize, *mut Handle, usize, Handle, Handle) -> i32;
    }
}

/// Returns the functions of the torch that this process has loaded.
///
/// # Errors
/// `Invalid` where it has none, or one without them.
pub(super) fn torch() -> Result<&'static Torch> {
    static TORCH: OnceLock<std::result::Result<Torch, String>> = OnceLock::new();
    let found = TORCH.get_or_init(|| {
        // SAFETY: the library has been loaded, so nothing runs.
        let library = unsafe { Library::open(Some("libtorch_cpu.so"), RTLD_NOW | RTLD_NOLOAD) };
        let found = library.and_then(|library| {
            let calls = Torch::of(&library)?;
            // Function pointers live as long as the library: for ever.
            std::mem::forget(library);
            Ok(calls)
        });
        found.map_err(|cause| cause.to_string())
    });
    found.as_ref().map_err(|cause| {
        super::refused("this torch has no functions for compiled models").with("cause", cause)
    })
}

/// Loads a compiled model. It is never unloaded: threads may have things of it.
///
/// # Errors
/// What the loader says.
pub(super) fn load(path: &Path) -> std::result::Result<ModelCalls, libloading::Error> {
    // SAFETY: its initialisers are torch's; the caller has asked for the code to be run.
    let library = unsafe { Library::open(Some(path), RTLD_NOW | RTLD_LOCAL)? };
    let calls = ModelCalls::of(&library)?;
    std::mem::forget(library);
    Ok(calls)
}
