// abi/exchange.h    see ../abi.h
#pragma once
