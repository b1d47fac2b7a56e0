// abi/conformance.h    see ../abi.h
#pragma once
